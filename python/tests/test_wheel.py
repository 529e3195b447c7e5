# SPDX-License-Identifier: Apache-2.0
"""The wheel of scripts/wheel brings oneDNN along: it runs where the machine has none."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

PROGRAM = """
import re
import numpy as np
import distmoe

config = distmoe.Config(max_tokens=4, hidden_dim=64, intermediate_dim=32, top_k=2, num_experts=8,
                        max_moe_layers_per_activation_slot=1, inference=True)
bf16 = lambda array: distmoe.Reinterpreted(array, "bf16")
x, y = np.full((4, 64), 0x3F80, np.uint16), np.zeros((4, 64), np.uint16)
w13, w2 = np.full((8, 64, 64), 0x3C00, np.uint16), np.full((8, 64, 32), 0x3C00, np.uint16)
ids, scores = np.arange(8, dtype=np.int32).reshape(4, 2), np.full((4, 2), 0.5, np.float32)
with distmoe.Context.create(config) as context:
    distmoe.routed_experts(context, bf16(x), ids, scores, bf16(w13), bf16(w2), bf16(y))
assert y.all()
print(*sorted(set(re.findall(r"/.*dnnl.*", open("/proc/self/maps").read()))))
"""

# Debian's libraries, of which the wheel must need none.
HIDE = """
for file in /usr/lib/x86_64-linux-gnu/lib{dnnl,gomp,OpenCL,distmoe}*.so*; do
  if [ -e "$file" ]; then mount --bind /dev/null "$(realpath "$file")"; fi
done
exec "$@"
"""


def run(*command, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("only root may hide the machine's oneDNN")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("there are no mount namespaces here")
    folder = tmp_path_factory.mktemp("wheel")
    run(root / "scripts/wheel", "--python", sys.executable, folder)
    (made,) = folder.glob("*.whl")
    return made


def test_it_runs_in_a_fresh_environment_without_the_machines_onednn(wheel, tmp_path):
    assert "manylinux_2_" in wheel.name
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    python = tmp_path / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--no-index", "--no-deps", wheel)
    (site,) = tmp_path.glob("lib/python3*/site-packages")
    for name in ("numpy", "numpy.libs"):
        (site / name).symlink_to(Path(numpy.__file__).parents[1] / name)
    mapped = run("unshare", "--mount", "bash", "-c", HIDE, "bash", python, "-c", PROGRAM)
    assert mapped.split() == [str(site / "distmoe/libdnnl.so.2")]
    licences = {path.name for path in (site / "distmoe/licences").iterdir()}
    assert licences & {"onednn", "libdnnl2"} and "libstdc++6" not in licences


def test_wrong_arguments(root, tmp_path):
    for arguments, words in (
        ([], "usage: scripts/wheel"),
        (["--fast", "x"], "usage: scripts/wheel"),
        (["--python", "/bin/false", tmp_path], "has no nanobind"),
        (["--python", "no-such-python", tmp_path], "there is no program no-such-python"),
    ):
        command = [root / "scripts/wheel", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr, done.stderr
