# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of every route's result, with what dist_moe checks at a call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

import distmoe


@dataclass(frozen=True)
class RMSNormPostprocess:
    """y = sum over k of score * h3 / rms(h3); nothing is checked before a call.

    Observers read along: `observe_expert_output_fn(h3)` in the forward,
    `observe_expert_output_grad_fn(h3, grad_h3)` in the backward, with a row for each of the T * K
    routes. `require_bitwise` holds anyway.
    """

    eps: float
    norm_output_dtype: torch.dtype
    output_dtype: torch.dtype
    require_bitwise: bool = True
    weight: torch.Tensor | None = None
    gain_center: float = 0.0
    use_kahan: bool = False
    observe_expert_output_fn: Callable[[torch.Tensor], None] | None = None
    observe_expert_output_grad_fn: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    recompute_rstd: bool = False

    @property
    def has_observer(self) -> bool:
        return (
            self.observe_expert_output_fn is not None
            or self.observe_expert_output_grad_fn is not None
        )


def supports_fused_post_expert_rmsnorm(
    *,
    input_dtype: torch.dtype,
    score_dtype: torch.dtype,
    norm_output_dtype: torch.dtype,
    output_dtype: torch.dtype,
    topk: int,
    dim: int,
) -> bool:
    """Whether a call with an RMSNormPostprocess of these types and sizes is accepted."""
    return output_dtype == input_dtype and not _contract_breaks(
        input_dtype, score_dtype, norm_output_dtype, output_dtype, topk, dim
    )


def _contract_breaks(input_dtype, score_dtype, norm_output_dtype, output_dtype, topk, dim) -> str:
    """What breaks the contract of the fused norm; empty where nothing does."""
    if input_dtype != torch.bfloat16:
        return f"expert outputs must be torch.bfloat16, got {input_dtype}"
    if score_dtype != torch.float32:
        return f"scores must be torch.float32, got {score_dtype}"
    if norm_output_dtype != torch.float32:
        return f"norm_output_dtype must be torch.float32, got {norm_output_dtype}"
    if output_dtype not in (torch.bfloat16, torch.float32):
        return f"output_dtype must be torch.bfloat16 or torch.float32, got {output_dtype}"
    if topk not in (2, 8):
        return f"top_k must be 2 or 8, got {topk}"
    if not 256 <= dim <= 16384 or dim % 128 != 0:
        return f"hidden_dim must be a multiple of 128 from 256 to 16384, got {dim}"
    return ""


def core_norm(
    norm: RMSNormPostprocess, x: torch.Tensor, scores: torch.Tensor, *, inference: bool
) -> distmoe.PostExpertNorm:
    """The norm of a call; ValueError where it breaks the contract."""
    if not math.isfinite(norm.eps) or norm.eps <= 0:
        raise ValueError(f"eps must be finite and positive, got {norm.eps}")
    if norm.output_dtype != x.dtype:
        raise ValueError(f"output_dtype must be that of x, {x.dtype}, got {norm.output_dtype}")
    topk, dim = scores.shape[1], x.shape[1]
    broken = _contract_breaks(
        x.dtype, scores.dtype, norm.norm_output_dtype, norm.output_dtype, topk, dim
    )
    if not broken and not inference and not norm.require_bitwise and dim > 12288:
        broken = f"without require_bitwise hidden_dim must be at most 12288, got {dim}"
    if broken:
        raise ValueError(f"unsupported RMSNormPostprocess: {broken}")
    _check_weight(norm, x, inference)
    return distmoe.PostExpertNorm(
        eps=norm.eps,
        gamma=norm.weight,
        gain_center=norm.gain_center,
        uses_kahan=norm.use_kahan,
        recomputes_rstd=norm.recompute_rstd,
    )


def _check_weight(norm: RMSNormPostprocess, x: torch.Tensor, inference: bool) -> None:
    weight = norm.weight
    if weight is None:
        if norm.gain_center != 0:
            raise ValueError(f"gain_center needs a weight, got {norm.gain_center} without")
        return
    if norm.use_kahan:
        raise ValueError("use_kahan is not for a norm with a weight")
    if not inference:
        raise ValueError("a norm with a weight needs an inference context")
    if (
        weight.shape != x.shape[1:]
        or weight.dtype != x.dtype
        or weight.device != x.device
        or not weight.is_contiguous()
    ):
        raise ValueError(
            f"the norm's weight must be contiguous {x.dtype} [{x.shape[1]}] on {x.device}, got"
            f" {weight.dtype} {list(weight.shape)} on {weight.device}"
        )


def output_gradient(
    h3: torch.Tensor, scores: torch.Tensor, grad_y: torch.Tensor, eps: float
) -> torch.Tensor:
    """The gradient of h3 [T * K, D] before its norm, as observers see it: BF16."""
    rows = h3.float()
    rstd = torch.rsqrt(rows.square().mean(dim=1, keepdim=True) + eps)
    normed = rows * rstd
    weighted = grad_y.float().repeat_interleave(scores.shape[1], 0) * scores.reshape(-1, 1)
    inner = (normed * weighted).mean(dim=1, keepdim=True)
    return ((weighted - normed * inner) * rstd).to(torch.bfloat16)
