# SPDX-License-Identifier: Apache-2.0
"""Which devices tests run on, and why not on a GPU."""

from __future__ import annotations

import pytest
import torch

import distmoe
from layer import make_config


def _why_no_gpu() -> str:
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    try:
        distmoe.Context.create(make_config(inference=True), backend="cuda").close()
    except distmoe.UnsupportedError as error:
        return str(error)
    return ""


WHY_NO_GPU = _why_no_gpu()
needs_gpu = pytest.mark.skipif(WHY_NO_GPU != "", reason=WHY_NO_GPU)
needs_two_gpus = pytest.mark.skipif(
    WHY_NO_GPU != "" or torch.cuda.device_count() < 2, reason=WHY_NO_GPU or "there is one GPU"
)
