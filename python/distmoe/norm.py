# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of every route's result before the combine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PostExpertNorm:
    """y = sum over k of score * h3 * rstd, rstd = 1 / sqrt(mean(h3^2) + eps), in FP32.

    `gamma` (BF16 [D]) and `gain_center` are for inference contexts; a call checks the values.
    """

    eps: float = 1e-6
    gamma: Any = None
    gain_center: float = 0.0
    uses_kahan: bool = False
    recomputes_rstd: bool = False
