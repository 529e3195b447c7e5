# SPDX-License-Identifier: Apache-2.0
"""examples/python/swap_experts.py prints the same loss for both experts."""

import re
import subprocess
import sys


def test_swap_experts(root):
    command = [sys.executable, root / "examples/python/swap_experts.py"]
    command += [root / "testdata/gptoss", root / "README.md", "--tokens", "64", "--train"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = re.findall(r"^(\w+): ([0-9.]+) nats a token, [0-9.]+ s, 64 tokens$", done.stdout, re.M)
    assert [name for name, _ in lines] == ["grouped_mm", "distmoe"]
    stock, ours = (float(loss) for _, loss in lines)
    assert 1 < stock < 6  # English words to a model of Python
    assert abs(ours - stock) < 0.02
