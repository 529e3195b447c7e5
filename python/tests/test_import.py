# SPDX-License-Identifier: Apache-2.0
"""The package alone needs neither PyTorch nor NumPy, and says what it is."""

import re
import subprocess
import sys
from pathlib import Path

import distmoe


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )


def test_importing_loads_neither_torch_nor_numpy():
    done = run("import distmoe, sys; print(sorted({'torch', 'numpy'} & set(sys.modules)))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_it_takes_less_than_a_third_of_a_second():
    program = """
import time
start = time.perf_counter()
import distmoe
print(time.perf_counter() - start)
"""
    seconds = min(float(run(program).stdout) for _ in range(5))
    assert 0 < seconds < 0.3


def test_the_interface_works_where_torch_and_numpy_are_missing():
    program = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None  # importing them raises ImportError
import distmoe
config = distmoe.Config(max_tokens=4, hidden_dim=8, intermediate_dim=8, top_k=2, num_experts=4,
                        max_moe_layers_per_activation_slot=1)
with distmoe.Context.create(config) as context:
    print(context.allocated_bytes == distmoe.plan_memory(config, 1, num_threads=
          context.memory_plan.num_threads).allocated_bytes)
"""
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_every_public_name_exists():
    assert all(hasattr(distmoe, name) for name in distmoe.__all__)
    assert distmoe.__all__ == sorted(distmoe.__all__)


def test_types_are_shipped():
    folder = Path(distmoe.__file__).parent
    assert (folder / "py.typed").exists()
    stub = (folder / "_core.pyi").read_text()
    assert "class Context:" in stub and "def routed_experts(" in stub
    for name in vars(distmoe._core):
        if not name.startswith("_"):
            assert re.search(rf"^(class|def) {name}\b|^{name}\b", stub, re.MULTILINE), name


def test_the_version_is_that_of_the_library():
    from importlib.metadata import version

    assert distmoe.__version__ == version("distmoe")


def test_a_forgotten_close_at_exit_is_silent():
    program = """
import distmoe
config = distmoe.Config(max_tokens=4, hidden_dim=8, intermediate_dim=8, top_k=2, num_experts=4,
                        max_moe_layers_per_activation_slot=1)
keep = [distmoe.Context.create(config, communicator) for communicator in [None]]
keep.append(keep)  # a cycle, which nothing frees before the interpreter ends
"""
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
