# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from devices import WHY_NO_GPU

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The source tree, whose build folder holds the command."""
    return ROOT


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request) -> str:
    """The CPU, and a GPU where distmoe and PyTorch both have one."""
    if request.param == "cuda" and WHY_NO_GPU:
        pytest.skip(WHY_NO_GPU)
    return request.param
