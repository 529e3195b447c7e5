# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the operator's overhead runs and prints what it promises."""

import re
import subprocess
import sys


def test_it_prints_operators_beside_empty_ones(root):
    program = root / "python/bench/operator_overhead.py"
    done = subprocess.run(
        [sys.executable, str(program), "--calls", "100"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^ *(\S.*?) +(-?[0-9.]+) (us|ms)$", done.stdout, re.MULTILINE)
    assert len(lines) == len(done.stdout.splitlines()) == 9
    times = {name: float(value) for name, value, _ in lines[:-1]}
    assert 0 < times["import distmoe"] < 300
    for kind, empty in (
        ("forward", "forward, empty operator of the same signature"),
        ("forward for a backward", "forward for a backward, empty operator"),
    ):
        assert 0 < times[empty] and 0 < times[f"{kind}, distmoe.torch.routed_experts"]
