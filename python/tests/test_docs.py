# SPDX-License-Identifier: Apache-2.0
"""Every block of the pages that opens with ```python is a program that runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)
    )
]


def test_the_pages_have_programs():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("program", BLOCKS)
def test_program_runs(program, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
