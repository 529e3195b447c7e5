# SPDX-License-Identifier: Apache-2.0
"""A program of the caller between the experts and the combine.

The result of each route has to be seen, which the calls of distmoe keep to themselves. So each
route becomes a token with one expert and the score 1, whose y is h3 to the bit; what the program
makes of it is combined here, by the rule of the library: in FP32, in the order of k, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distmoe.torch.double_backward import differentiable_once
from distmoe.torch.eager import stream_of
from distmoe.torch.graph_task import adds_to_every_leaf
from distmoe.torch.refusals import refuse

Postprocess = Callable[[torch.Tensor], torch.Tensor]


class RepeatTokens(torch.autograd.Function):
    """x [T, D] to [T * K, D]; the gradient of a token is summed over k in FP32 and rounded once."""

    @staticmethod
    def forward(ctx, x, top_k):
        ctx.top_k = top_k
        return x.repeat_interleave(top_k, 0)

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_rows):
        by_token = grad_rows.view(-1, ctx.top_k, grad_rows.shape[1])
        return (_sum_over_k(by_token.float()).to(grad_rows.dtype), None), []


def _sum_over_k(rows: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(rows[:, 0])
    for k in range(rows.shape[1]):  # in order, as everywhere in the library
        total = total + rows[:, k]
    return total


def _combine(rows: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """y of h3 [T * K, D]; a disabled route (id -1) adds nothing, whatever its score holds."""
    is_off = (ids < 0).unsqueeze(-1)
    weighted = rows.view(*ids.shape, -1).float().masked_fill(is_off, 0.0)
    weighted = weighted * scores.float().unsqueeze(-1).masked_fill(is_off, 0.0)
    return _sum_over_k(weighted).to(torch.bfloat16)


def _checked(answer: object, rows: torch.Tensor) -> torch.Tensor:
    if not isinstance(answer, torch.Tensor):
        raise TypeError(
            f"experts_output_postprocess must return a tensor, got {type(answer).__name__}"
        )
    if answer.shape != rows.shape:
        raise ValueError(
            f"experts_output_postprocess must preserve route shape {list(rows.shape)}, got"
            f" {list(answer.shape)}"
        )
    if answer.device != rows.device:
        raise ValueError(f"experts_output_postprocess must stay on {rows.device}: {answer.device}")
    if not answer.is_contiguous():
        raise ValueError(
            f"experts_output_postprocess must return a contiguous tensor: {list(answer.stride())}"
        )
    if answer.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(
            "experts_output_postprocess must return float16, bfloat16, or float32, got"
            f" {answer.dtype}"
        )
    return answer


class PostprocessAndCombine(torch.autograd.Function):
    """y of the routes' results; backward runs the program again, with gradients.

    Parameters that the program closes over get theirs in a backward() of everything alone: one of
    `inputs`, and torch.autograd.grad(), leave their .grad as it is.
    """

    @staticmethod
    def forward(ctx, rows, scores, ids, postprocess, core):
        with torch.no_grad():
            answer = _checked(postprocess(rows.detach()), rows)
            y = _combine(answer, scores, ids)
        ctx.postprocess, ctx.dtype, ctx.core = postprocess, answer.dtype, core
        ctx.save_for_backward(rows, scores, ids)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_y):
        try:
            return PostprocessAndCombine._run_backward(ctx, grad_y)
        except Exception as error:
            if not ctx.needs_input_grad[0]:
                raise
            # The peers' next step is the backward of the experts.
            refuse(ctx.core, error, stream=stream_of(grad_y), is_backward=True)

    @staticmethod
    def _run_backward(ctx, grad_y):
        rows, scores, ids = ctx.saved_tensors
        with torch.enable_grad():
            again = rows.detach().requires_grad_()
            weights = scores.detach().requires_grad_()
            answer = _checked(ctx.postprocess(again), again)
            if answer.dtype != ctx.dtype:
                raise ValueError(
                    f"experts_output_postprocess changed dtype from {ctx.dtype} to {answer.dtype}"
                )
            y = _combine(answer, weights, ids)
        # The graph of y does not lead to what the program closes over: that is known here alone, so
        # it gets its gradients where the backward adds to everything.
        if adds_to_every_leaf():
            torch.autograd.backward(y, grad_y)
            gradients = again.grad, weights.grad
        else:
            gradients = torch.autograd.grad(y, (again, weights), grad_y, allow_unused=True)
        return (*gradients, None, None, None), [rows, scores]
