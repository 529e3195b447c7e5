# SPDX-License-Identifier: Apache-2.0
"""Gradients that have no derivatives of their own, and say so.

PyTorch's once_differentiable raises where the gradient of the output has a graph. Where the loss is
linear in the output it has none, and derivatives through the inputs and weights would be zero
without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import distmoe

Gradients = Sequence[Tensor | None]


def new_anchor() -> Tensor:
    """Nothing, as an output of a function: where it is saved for the backward, it stands for all
    inputs of the function and holds none of them."""
    return torch.empty(0)


def differentiable_once(backward: Callable[..., tuple[Gradients, Gradients]]):
    """The backward of an autograd.Function that returns its gradients, and the tensors that these
    depend on beside the gradients that it got. `ctx.creates_graph` says whether autograd records
    it."""

    @functools.wraps(backward)
    def run(ctx, *grads: Tensor | None) -> Gradients:
        ctx.creates_graph = torch.is_grad_enabled()
        with torch.no_grad():
            gradients, sources = backward(ctx, *grads)
        if not ctx.creates_graph:
            return gradients
        sources = [t for t in (*grads, *sources) if t is not None and t.requires_grad]
        made = [t for t in gradients if t is not None]
        recorded = iter(_OfFirstOrder.apply(len(sources), *sources, *made))
        return tuple(None if t is None else next(recorded) for t in gradients)

    return run


class _OfFirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, num_sources: int, *tensors: Tensor):
        return tensors[num_sources:]

    @staticmethod
    def backward(ctx, *_):
        raise distmoe.UnsupportedError(
            "distmoe has no double backward: a gradient that it computed is part of a loss that is"
            " differentiated (create_graph=True, a penalty on gradients, torch.func.hessian)"
        )
