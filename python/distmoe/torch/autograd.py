# SPDX-License-Identifier: Apache-2.0
"""The backward of distmoe::saving_routed_experts.

Under activation checkpointing the first forward's saved tensors are dropped at once and its
forward runs again in backward. What it kept is then discarded from the slot; the second run's is
used, in the order of a stack. Other hooks on saved tensors copy them: the node itself holds what
they name.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import distmoe
from distmoe import _core
from distmoe.torch import accumulation, operators
from distmoe.torch.context import context_of


def _is_tracing(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(tensor) is not Tensor


def _hook_module() -> str | None:
    """Where the hook comes from that takes the tensors that are saved now, if any does."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0].__module__


def _save(ctx, inputs, output) -> None:
    x, _, scores, w13, w2, bias13, bias2, _, _, number, accumulates = inputs
    _, saved = output
    ctx.mark_non_differentiable(saved)
    ctx.save_for_backward(saved, w13, w2, bias13, bias2)
    ctx.number, ctx.scores_dtype, ctx.owners = number, scores.dtype, None
    if _is_tracing(saved):
        if accumulates:
            raise distmoe.UnsupportedError(
                "accumulate_wgrad adds to parameter.grad, which a traced graph does not know: call"
                " it eagerly"
            )
        return
    hook = _hook_module()
    if hook == "torch.utils.checkpoint":
        _core.expect_drop(context_of(number).core, saved.item())
    elif hook is not None:
        ctx.saved_number = saved
    if accumulates:
        ctx.owners = accumulation.owners_of((w13, w2, bias13, bias2))


class _SavingRoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            output = operators.saving_routed_experts_op(*inputs)
        _save(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, _):
        saved, w13, w2, bias13, bias2 = ctx.saved_tensors
        needs_x, _, needs_scores, needs_w13, needs_w2, needs_bias13, needs_bias2 = (
            ctx.needs_input_grad[:7]
        )
        needs = [needs_x, needs_scores, needs_w13, needs_w2, needs_bias13, needs_bias2]
        weights = (w13, w2, bias13, bias2)
        dy = dy.contiguous()
        if ctx.owners is not None:
            gradients = accumulation.accumulate(
                context_of(ctx.number), saved, dy, weights, ctx.scores_dtype, needs, ctx.owners
            )
        else:
            gradients = operators.routed_experts_backward_op(
                dy, saved, *weights, ctx.scores_dtype, needs, ctx.number
            )
            gradients = [g if needed else None for g, needed in zip(gradients, needs, strict=True)]
        grad_x, grad_scores, *of_weights = gradients
        return grad_x, None, grad_scores, *of_weights, None, None, None, None


def _saving_routed_experts(*inputs):
    # NOTE: torch.library.register_autograd() would do the same at 25 us a call more: it looks up
    # the defaults of the schema every time.
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):
        return _SavingRoutedExperts.apply(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return operators.saving_routed_experts_op(*inputs)


operators._library.impl("saving_routed_experts", _saving_routed_experts, "Autograd")
