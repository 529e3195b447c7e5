# SPDX-License-Identifier: Apache-2.0
"""The operators distmoe::..., which graphs name.

A saved forward crosses a graph as an int64 tensor of one number. The number names it in its
context, and it lives as long as that tensor's memory: a graph that is dropped without a backward
drops it, and its slot needs reset(). Operators carry ordered effects, so that compilers neither
drop, join, move nor run them again: every rank makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import distmoe
from distmoe import _core
from distmoe.torch.context import Context, context_of
from distmoe.torch.eager import WEIGHT_NAMES, needs_backward, stream_of

_library = torch.library.Library("distmoe", "DEF")

_INPUTS = "Tensor x, Tensor topk_ids, Tensor topk_scores, Tensor w13, Tensor w2"
_OPTIONS = "Tensor? bias13, Tensor? bias2, float norm_eps, bool norm_uses_kahan, int context"
_GRADIENT_INPUTS = "Tensor dy, Tensor saved, Tensor w13, Tensor w2, Tensor? bias13, Tensor? bias2"
_EXACT_STRIDES = (torch.Tag.needs_exact_strides,)

_library.define(f"routed_experts({_INPUTS}, {_OPTIONS}) -> Tensor", tags=_EXACT_STRIDES)
_library.define(
    f"saving_routed_experts({_INPUTS}, {_OPTIONS}, bool accumulates) -> (Tensor y, Tensor saved)",
    tags=_EXACT_STRIDES,
)
# `needs`: which of x, scores, w13, w2, bias13, bias2 get a gradient; the others' are empty.
_library.define(
    f"routed_experts_backward({_GRADIENT_INPUTS}, ScalarType scores_dtype, bool[6] needs,"
    " int context) -> (Tensor grad_x, Tensor grad_scores, Tensor grad_w13, Tensor grad_w2,"
    " Tensor grad_bias13, Tensor grad_bias2)",
    tags=_EXACT_STRIDES,
)

GRADIENT_NAMES = ("x", "scores", *WEIGHT_NAMES)


def _norm(eps: float, uses_kahan: bool) -> distmoe.PostExpertNorm | None:
    """eps 0 stands for no norm: no norm may have it."""
    return None if eps == 0 else distmoe.PostExpertNorm(eps=eps, uses_kahan=uses_kahan)


def _y_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)


# --- forward ---


def _routed_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    w13: Tensor,
    w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    norm_eps: float,
    norm_uses_kahan: bool,
    context: int,
) -> Tensor:
    if needs_backward(x, topk_scores, w13, w2, bias13, bias2):
        raise distmoe.InvalidArgumentError(
            "distmoe::routed_experts has no backward, but an input requires grad;"
            " distmoe.torch.routed_experts takes the operator that has one"
        )
    y = _y_like(x)
    distmoe.routed_experts(
        context_of(context).core,
        x,
        topk_ids,
        topk_scores,
        w13,
        w2,
        y,
        bias13=bias13,
        bias2=bias2,
        norm=_norm(norm_eps, norm_uses_kahan),
        stream=stream_of(x),
    )
    return y


def _saving_routed_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    w13: Tensor,
    w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    norm_eps: float,
    norm_uses_kahan: bool,
    context: int,
    accumulates: bool,
) -> tuple[Tensor, Tensor]:
    core = context_of(context).core
    y = _y_like(x)
    saved = distmoe.saving_routed_experts(
        core,
        x,
        topk_ids,
        topk_scores,
        w13,
        w2,
        y,
        bias13=bias13,
        bias2=bias2,
        norm=_norm(norm_eps, norm_uses_kahan),
        stream=stream_of(x),
    )
    return y, torch.utils.dlpack.from_dlpack(_core.saved_tensor(core, saved))


# --- backward ---


def _empty(dy: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.bfloat16, device=dy.device)


def gradient_places(
    dy: Tensor, weights: Sequence[Tensor | None], scores_dtype, needs: Sequence[bool], own: Context
) -> list[Tensor | None]:
    """New memory for the gradients that are needed."""
    made = [(dy.shape, torch.bfloat16), ((dy.shape[0], own.config.top_k), scores_dtype)]
    made += [
        ((0,), torch.bfloat16)
        if weight is None
        else (weight.shape, own.wgrad_dtype or weight.dtype)
        for weight in weights
    ]
    return [
        torch.empty(shape, dtype=dtype, device=dy.device) if needed else None
        for (shape, dtype), needed in zip(made, needs, strict=True)
    ]


def run_backward(
    own: Context,
    saved: Tensor,
    dy: Tensor,
    weights: Sequence[Tensor | None],
    places: Sequence[Tensor | None],
    accumulate: Sequence[str] = (),
) -> None:
    """Writes the gradients that have a place, those named in `accumulate` by adding."""
    w13, w2, bias13, bias2 = weights
    distmoe.routed_experts_backward(
        own.core,
        _core.saved_of_number(own.core, int(saved.item())),
        dy,
        w13,
        w2,
        bias13=bias13,
        bias2=bias2,
        **{f"grad_{name}": place for name, place in zip(GRADIENT_NAMES, places, strict=True)},
        accumulate=accumulate,
        stream=stream_of(dy),
    )


def _routed_experts_backward(
    dy: Tensor,
    saved: Tensor,
    w13: Tensor,
    w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    scores_dtype: torch.dtype,
    needs: list[bool],
    context: int,
) -> tuple[Tensor, ...]:
    own = context_of(context)
    weights = (w13, w2, bias13, bias2)
    places = gradient_places(dy, weights, scores_dtype, needs, own)
    run_backward(own, saved, dy, weights, places)
    return tuple(_empty(dy) if place is None else place for place in places)


for _device in ("CPU", "CUDA"):
    _library.impl("routed_experts", _routed_experts, _device)
    _library.impl("saving_routed_experts", _saving_routed_experts, _device)
    _library.impl("routed_experts_backward", _routed_experts_backward, _device)


# --- shapes and types alone ---


def _fake_routed_experts(x, *_):
    return _y_like(x)


def _fake_saving_routed_experts(x, *_):
    device = "meta" if x.device.type == "meta" else "cpu"
    return _y_like(x), torch.empty(1, dtype=torch.int64, device=device)


def _fake_routed_experts_backward(dy, saved, w13, w2, bias13, bias2, scores_dtype, needs, context):
    own, weights = context_of(context), (w13, w2, bias13, bias2)
    places = gradient_places(dy, weights, scores_dtype, needs, own)
    return tuple(_empty(dy) if place is None else place for place in places)


for _name, _fake in (
    ("routed_experts", _fake_routed_experts),
    ("saving_routed_experts", _fake_saving_routed_experts),
    ("routed_experts_backward", _fake_routed_experts_backward),
):
    torch.library.register_fake(f"distmoe::{_name}", _fake, lib=_library)
    _register_effectful_op(getattr(torch.ops.distmoe, _name).default, _EffectType.ORDERED)

routed_experts_op = torch.ops.distmoe.routed_experts.default
saving_routed_experts_op = torch.ops.distmoe.saving_routed_experts.default
routed_experts_backward_op = torch.ops.distmoe.routed_experts_backward.default
