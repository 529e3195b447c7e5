# SPDX-License-Identifier: Apache-2.0
"""Every Python example runs and prints what it promises."""

import re
import subprocess
import sys

from test_torch_distributed import torchrun


def test_train_torchrun(root):
    done = torchrun(str(root / "examples/python/train_torchrun.py"))
    assert done.returncode == 0, done.stderr
    losses = [float(value) for value in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert len(losses) == 7 and losses[-1] < 0.6 * losses[0]
    assert "rows of the last layer's experts: [" in done.stdout


def test_plan_memory(root):
    command = [sys.executable, str(root / "examples/python/plan_memory.py"), "--budget-gib", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert re.search(r"3 slots of 12 layers, factor 1\.0: [0-9.]+ GiB, does not fit", done.stdout)
    assert re.search(r"3 slots of 12 layers, factor 0\.0: [0-9.]+ GiB, fits", done.stdout)


def test_low_precision_inference(root):
    program = root / "examples/python/low_precision_inference.py"
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=True, timeout=60
    )
    lines = re.findall(r"(\w+) +([0-9.]+) MiB of weights, ([0-9.]+) from BF16", done.stdout)
    assert [line[0] for line in lines] == ["bf16", "mxfp8", "mxfp4", "nvfp4"]
    (all_bytes, *coded), (none, mxfp8, *fp4) = ([float(line[i]) for line in lines] for i in (1, 2))
    assert none == 0 and 0 < mxfp8 < 0.1 and all(mxfp8 < error < 0.35 for error in fp4)
    assert coded[0] < 0.52 * all_bytes and max(coded[1:]) < 0.29 * all_bytes


def test_every_example_has_a_test(root):
    tests = "".join(path.read_text() for path in (root / "python/tests").glob("test_*.py"))
    examples = sorted((root / "examples/python").glob("*.py"))
    assert len(examples) >= 3
    assert [path.name for path in examples if path.name not in tests] == []
