# SPDX-License-Identifier: Apache-2.0
"""The autograd of distmoe::routed_experts: distmoe::saving_routed_experts and its backward.

Under activation checkpointing the first forward's saved tensors are dropped at once and its
forward runs again in backward. What it kept is then discarded from the slot; the second run's is
used, in the order of a stack. Other hooks on saved tensors copy them: the node itself holds what
they name.
"""

from __future__ import annotations

import torch
from torch import Tensor

import distmoe
from distmoe import _core
from distmoe.torch import accumulation, operators
from distmoe.torch.context import context_of
from distmoe.torch.double_backward import differentiable_once, new_anchor
from distmoe.torch.eager import WEIGHT_NAMES, stream_of
from distmoe.torch.refusals import refuse_tangents, run_backward
from distmoe.torch.weights import Weights

_GAMMA = 10  # of distmoe::routed_experts' inputs


def _is_tracing(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(tensor) is not Tensor


def _hook_module() -> str | None:
    """Where the hook comes from that takes the tensors that are saved now, if any does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0].__module__


def _refuse_inference(inputs) -> None:
    names = ("x", "topk_ids", "topk_scores", *WEIGHT_NAMES)
    tensors = dict(zip(names, inputs), **{"norm.gamma": inputs[_GAMMA]})
    wanting = [name for name, t in tensors.items() if t is not None and t.requires_grad]
    raise distmoe.InvalidArgumentError(
        f"{', '.join(wanting)} require(s) grad, but the context is for inference"
        " (Config.inference): call it under torch.no_grad(), or make a context for training"
    )


def _save(ctx, inputs, saved, anchor) -> None:
    *weights, prepared = inputs[3:8]
    ctx.save_for_backward(anchor, saved, *weights, *prepared)
    ctx.scores_dtype, ctx.owners = inputs[2].dtype, None
    *_, ctx.number, accumulates = inputs
    if _is_tracing(saved):
        if accumulates:
            raise distmoe.UnsupportedError(
                "accumulate_wgrad adds to parameter.grad, which a traced graph does not know: call"
                " it eagerly"
            )
        return
    ctx.context = context_of(ctx.number)  # lives as long as the graph
    hook = _hook_module()
    if hook == "torch.utils.checkpoint":
        _core.expect_drop(ctx.context.core, saved.item())
    elif hook is not None:
        ctx.saved_number = saved
    if accumulates:
        ctx.owners = accumulation.owners_of(weights)


class _SavingRoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            y, counts, saved = operators.saving_routed_experts_op(*inputs[:-1])
        ctx.mark_non_differentiable(counts, saved)
        anchor = None if _is_tracing(saved) else new_anchor()  # compilers refuse it themselves
        _save(ctx, inputs, saved, anchor)
        return y, counts, saved, anchor

    @staticmethod
    @differentiable_once
    def backward(ctx, dy: Tensor, *_):
        if _is_tracing(dy):
            return _SavingRoutedExperts._run_backward(ctx, dy)
        return run_backward(
            context_of(ctx.number).core,
            stream_of(dy),
            lambda: _SavingRoutedExperts._run_backward(ctx, dy),
        )

    @staticmethod
    def _run_backward(ctx, dy: Tensor):
        anchor, saved, *tensors = ctx.saved_tensors
        weights = Weights(tensors[:4], tensors[4:])
        needs_x, _, needs_scores, *needs_weights = ctx.needs_input_grad[:7]
        needs = [needs_x, needs_scores, *needs_weights]
        dy = dy.contiguous()
        if ctx.owners is not None and not ctx.creates_graph:  # which autograd adds out of place
            gradients = accumulation.accumulate(
                context_of(ctx.number), saved, dy, weights, ctx.scores_dtype, needs, ctx.owners
            )
        else:
            gradients = operators.routed_experts_backward_op(
                dy, saved, *weights.given, weights.prepared, ctx.scores_dtype, needs, ctx.number
            )
            gradients = [g if needed else None for g, needed in zip(gradients, needs, strict=True)]
        grad_x, grad_scores, *of_weights = gradients
        return (grad_x, None, grad_scores, *of_weights, *[None] * 8), [anchor]


def _routed_experts(*inputs):
    refuse_tangents(*inputs[:7], inputs[_GAMMA])
    # NOTE: torch.library.register_autograd() would do the same at 25 us a call more: it looks up
    # the defaults of the schema every time.
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        if context_of(inputs[-2]).inference:
            _refuse_inference(inputs)
        y, counts, *_ = _SavingRoutedExperts.apply(*inputs)
        return y, counts
    return below_autograd(*inputs)


def below_autograd(*inputs) -> tuple[Tensor, Tensor]:
    """distmoe::routed_experts where no input requires a gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return operators.routed_experts_op(*inputs)


operators.library.impl("routed_experts", _routed_experts, "Autograd")
