# SPDX-License-Identifier: Apache-2.0
"""examples/python/swap_experts.py prints nearly the same loss for every kind of experts."""

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "names", "tolerance"),
    [
        (["--train"], ["grouped_mm", "distmoe"], 0.02),
        (
            ["--implementations", "distmoe", "distmoe_mxfp8", "distmoe_nvfp4"],
            ["distmoe", "distmoe_mxfp8", "distmoe_nvfp4"],
            0.2,
        ),
    ],
    ids=["training", "low_precision"],
)
def test_swap_experts(root, arguments, names, tolerance):
    command = [sys.executable, root / "examples/python/swap_experts.py"]
    command += [root / "testdata/gptoss", root / "README.md", "--tokens", "64", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = re.findall(r"^(\w+): ([0-9.]+) nats a token, [0-9.]+ s, 64 tokens$", done.stdout, re.M)
    assert [name for name, _ in lines] == names
    first, *others = (float(loss) for _, loss in lines)
    assert 1 < first < 6  # English words to a model of Python
    assert all(abs(other - first) < tolerance for other in others)
