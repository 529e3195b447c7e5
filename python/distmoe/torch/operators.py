# SPDX-License-Identifier: Apache-2.0
"""The operators distmoe::..., which graphs name.

`routed_experts` is the one that callers use; where an input requires a gradient, its autograd
(autograd.py) runs the other two. A saved forward crosses a graph as an int64 tensor of one number.
The number names it in its context, and it lives as long as that tensor's memory: a graph that is
dropped without a backward drops it, and its slot needs reset(). Operators carry ordered effects, so
that compilers neither drop, join, move nor run them again: every rank makes the same calls in the
same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import distmoe
from distmoe import _core
from distmoe.torch import shapes
from distmoe.torch.context import Context, context_of
from distmoe.torch.eager import WEIGHT_NAMES, stream_of
from distmoe.torch.refusals import is_traced, refuse_unless_begun
from distmoe.torch.weights import Weights

library = torch.library.Library("distmoe", "DEF")

# `prepared`: what is computed with in place of w13 and w2 (weights.split), or nothing.
_WEIGHTS = "Tensor w13, Tensor w2, Tensor? bias13, Tensor? bias2, Tensor[] prepared"
_INPUTS = f"Tensor x, Tensor topk_ids, Tensor topk_scores, {_WEIGHTS}"
# norm_eps 0: no norm; no clip_limit: nothing is counted, and clip_counts are empty.
_OPTIONS = (
    "float norm_eps, bool norm_uses_kahan, Tensor? norm_gamma, float norm_gain_center,"
    " float? clip_limit, int context"
)
_EXACT_STRIDES = (torch.Tag.needs_exact_strides,)

library.define(
    f"routed_experts({_INPUTS}, {_OPTIONS}, bool accumulates) -> (Tensor y, Tensor clip_counts)",
    tags=_EXACT_STRIDES,
)
library.define(
    f"saving_routed_experts({_INPUTS}, {_OPTIONS}) -> (Tensor y, Tensor clip_counts, Tensor saved)",
    tags=_EXACT_STRIDES,
)
# `needs`: which of x, scores, w13, w2, bias13, bias2 get a gradient; the others' are empty.
library.define(
    f"routed_experts_backward(Tensor dy, Tensor saved, {_WEIGHTS}, ScalarType scores_dtype,"
    " bool[6] needs, int context) -> (Tensor grad_x, Tensor grad_scores, Tensor grad_w13,"
    " Tensor grad_w2, Tensor grad_bias13, Tensor grad_bias2)",
    tags=_EXACT_STRIDES,
)

GRADIENT_NAMES = ("x", "scores", *WEIGHT_NAMES)


def _y_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)


def _counts_for(x: Tensor, clip_limit: float | None) -> Tensor:
    return torch.empty(0 if clip_limit is None else 3, dtype=torch.int64, device=x.device)


# --- forward ---


def _run_forward(
    forward: Callable[..., Any],
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    w13: Tensor,
    w2: Tensor,
    bias13: Tensor | None,
    bias2: Tensor | None,
    prepared: Sequence[Tensor],
    norm_eps: float,
    norm_uses_kahan: bool,
    norm_gamma: Tensor | None,
    norm_gain_center: float,
    clip_limit: float | None,
    context: int,
) -> tuple[Tensor, Tensor, Any]:
    """y, the counts, and what `forward` answers: a function of the core, or `_check_shapes`."""
    own = context_of(context)
    num_begun = own.core.num_begun_calls
    try:
        y, counts = _y_like(x), _counts_for(x, clip_limit)
        options: dict[str, Any] = {}
        if norm_eps != 0:
            options["norm"] = distmoe.PostExpertNorm(
                eps=norm_eps,
                uses_kahan=norm_uses_kahan,
                gamma=norm_gamma,
                gain_center=norm_gain_center,
            )
        if clip_limit is not None:
            options.update(clip_counts=counts, clip_limit=clip_limit)
        weights = Weights((w13, w2, bias13, bias2), prepared)
        answer = forward(own, x, topk_ids, topk_scores, weights, y, **options)
    except Exception as error:
        if is_traced(x, w13, w2):
            raise
        refuse_unless_begun(own.core, num_begun, error, stream=stream_of(x))
    return y, counts, answer


def _call_core(forward: Callable[..., Any], own: Context, x, ids, scores, weights, y, **options):
    arguments = weights.core_arguments(own.config)
    return forward(own.core, x, ids, scores, y=y, stream=stream_of(x), **arguments, **options)


_forward = functools.partial(_call_core, distmoe.routed_experts)
_saving_forward = functools.partial(_call_core, distmoe.saving_routed_experts)


def _routed_experts(*arguments) -> tuple[Tensor, Tensor]:
    y, counts, _ = _run_forward(_forward, *arguments[:-1])
    return y, counts


def _saving_routed_experts(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    y, counts, saved = _run_forward(_saving_forward, *arguments)
    capsule = _core.saved_tensor(context_of(arguments[-1]).core, saved)
    return y, counts, torch.utils.dlpack.from_dlpack(capsule)


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
    weights: Weights,
    places: Sequence[Tensor | None],
    accumulate: Sequence[str] = (),
) -> None:
    """Writes the gradients that have a place, those named in `accumulate` by adding."""
    distmoe.routed_experts_backward(
        own.core,
        _core.saved_of_number(own.core, int(saved.item())),
        dy,
        **weights.core_arguments(own.config),
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
    prepared: Sequence[Tensor],
    scores_dtype: torch.dtype,
    needs: list[bool],
    context: int,
) -> tuple[Tensor, ...]:
    own, given = context_of(context), (w13, w2, bias13, bias2)
    num_begun = own.core.num_begun_calls
    try:
        places = gradient_places(dy, given, scores_dtype, needs, own)
        run_backward(own, saved, dy, Weights(given, prepared), places)
    except Exception as error:
        stream = stream_of(dy)
        refuse_unless_begun(own.core, num_begun, error, stream=stream, is_backward=True)
    return tuple(_empty(dy) if place is None else place for place in places)


for _device in ("CPU", "CUDA"):
    library.impl("routed_experts", _routed_experts, _device)
    library.impl("saving_routed_experts", _saving_routed_experts, _device)
    library.impl("routed_experts_backward", _routed_experts_backward, _device)


# --- shapes and types alone ---


def _check_shapes(own: Context, x, ids, scores, weights: Weights, y, **options) -> None:
    shapes.check_one_device(x, ids, scores, *weights.given, *weights.prepared)
    shapes.check_forward(own, x, ids, scores, weights, y, **options)


def _fake_routed_experts(*arguments):
    y, counts, _ = _run_forward(_check_shapes, *arguments[:-1])
    return y, counts


def _fake_saving_routed_experts(*arguments):
    y, counts, _ = _run_forward(_check_shapes, *arguments)
    device = "meta" if y.device.type == "meta" else "cpu"
    return y, counts, torch.empty(1, dtype=torch.int64, device=device)


def _fake_routed_experts_backward(
    dy, saved, w13, w2, bias13, bias2, prepared, scores_dtype, needs, context
):
    own, given = context_of(context), (w13, w2, bias13, bias2)
    shapes.check_one_device(dy, *given)
    shapes.check_grad_y(own, dy)
    places = gradient_places(dy, given, scores_dtype, needs, own)
    return tuple(_empty(dy) if place is None else place for place in places)


for _name, _fake in (
    ("routed_experts", _fake_routed_experts),
    ("saving_routed_experts", _fake_saving_routed_experts),
    ("routed_experts_backward", _fake_routed_experts_backward),
):
    torch.library.register_fake(f"distmoe::{_name}", _fake, lib=library)
    _register_effectful_op(getattr(torch.ops.distmoe, _name).default, _EffectType.ORDERED)

routed_experts_op = torch.ops.distmoe.routed_experts.default
saving_routed_experts_op = torch.ops.distmoe.saving_routed_experts.default
routed_experts_backward_op = torch.ops.distmoe.routed_experts_backward.default
