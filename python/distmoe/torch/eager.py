# SPDX-License-Identifier: Apache-2.0
"""Forward and backward as one node of PyTorch's eager autograd, for callers with code in between.

`EagerCall` is what such a caller changes: the weights before they are used, where gradients go.
"""

from __future__ import annotations

import torch

import distmoe
from distmoe.torch.context import wgrad_dtype_of
from distmoe.torch.double_backward import differentiable_once, new_anchor
from distmoe.torch.graph_task import is_wanted
from distmoe.torch.refusals import refuse_tangents, refuse_unless_begun, run_backward

WEIGHT_NAMES = ("w13", "w2", "bias13", "bias2")


def stream_of(tensor: torch.Tensor) -> int:
    """PyTorch's current stream where the tensor is; 0 on the CPU."""
    return current_stream(tensor.device) if tensor.is_cuda else 0


def current_stream(device: torch.device) -> int:
    """PyTorch's on `device`; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    # NOTE: PyTorch's default stream is the null stream, and null means a context's own, which waits
    # for nobody's: the null stream has the name cudaStreamLegacy, 1, for that.
    return torch.cuda.current_stream(device).cuda_stream or 1


def needs_backward(*tensors: torch.Tensor | None) -> bool:
    refuse_tangents(*tensors)
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class EagerCall:
    """One call and its backward, on `context`, with the options of the forward."""

    def __init__(self, context: distmoe.Context, **options) -> None:
        self.context = context
        self.options = options
        self.saved_forward: distmoe.SavedForward | None = None

    def weights(self, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The weights to compute with; asked in the forward and again in the backward."""
        return given

    def operands(self, *used: torch.Tensor | None) -> tuple[object, ...]:
        """What the core computes with: `used`, or prepared weights in the place of some."""
        return used

    def destinations(
        self, used: dict[str, torch.Tensor], *, creates_graph: bool
    ) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Where the gradients of `used` weights are written, and the names of those added to.

        `creates_graph`: whether autograd records the backward, and adds out of place."""
        places = {
            name: torch.empty(weight.shape, dtype=self.wgrad_dtype(weight), device=weight.device)
            for name, weight in used.items()
        }
        return places, set()

    def wgrad_dtype(self, weight: torch.Tensor) -> torch.dtype:
        """Of the gradient of `weight` where nothing else says it."""
        return wgrad_dtype_of(self.context.config) or weight.dtype

    def deliver(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients that autograd gets."""
        return gradients

    def finish(self) -> None:
        """The backward is done."""


def run(
    call: EagerCall,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scores: torch.Tensor,
    *weights: torch.Tensor | None,
) -> torch.Tensor:
    """y of a call without backward."""
    return _run_forward(distmoe.routed_experts, call, (x, topk_ids, topk_scores), weights)[0]


def _run_forward(forward, call: EagerCall, inputs, weights):
    """y, and what `forward`, a function of the core, answers."""
    num_begun = call.context.num_begun_calls
    x = inputs[0]
    try:
        used = call.weights(*weights)
        y = torch.empty_like(x)
        answer = forward(
            call.context,
            *_detached(*inputs),
            y=y,
            **_operands(call, used),
            stream=stream_of(x),
            **call.options,
        )
    except Exception as error:
        refuse_unless_begun(call.context, num_begun, error, stream=stream_of(x))
    return y, answer


def _operands(call: EagerCall, used) -> dict[str, object]:
    return dict(zip(WEIGHT_NAMES, _detached(*call.operands(*used)), strict=True))


def _detached(*tensors: object) -> list[object]:
    """Without their graphs; what is no tensor (None, a prepared weight) as it is."""
    return [each.detach() if isinstance(each, torch.Tensor) else each for each in tensors]


def run_saving(
    call: EagerCall,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_scores: torch.Tensor,
    *weights: torch.Tensor | None,
) -> torch.Tensor:
    """y of a call whose backward gives gradients of x, the scores and the weights."""
    return _SavingExperts.apply(call, x, topk_ids, topk_scores, *weights)[0]


class _SavingExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, x, topk_ids, topk_scores, w13, w2, bias13, bias2):
        y, call.saved_forward = _run_forward(
            distmoe.saving_routed_experts,
            call,
            (x, topk_ids, topk_scores),
            (w13, w2, bias13, bias2),
        )
        ctx.call = call
        ctx.scores_like = (topk_scores.shape, topk_scores.dtype)
        anchor = new_anchor()
        ctx.save_for_backward(anchor, w13, w2, bias13, bias2)
        return y, anchor

    @staticmethod
    @differentiable_once
    def backward(ctx, grad_y, _):
        return run_backward(
            ctx.call.context,
            stream_of(grad_y),
            lambda: _SavingExperts._run_backward(ctx, grad_y),
        )

    @staticmethod
    def _run_backward(ctx, grad_y):
        call, needs = ctx.call, ctx.needs_input_grad
        anchor, *given = ctx.saved_tensors
        used = call.weights(*given)
        wanted = {
            name: used[index]
            for index, name in enumerate(WEIGHT_NAMES)
            if needs[4 + index] and is_wanted(given[index])
        }
        places, added = call.destinations(wanted, creates_graph=ctx.creates_graph)
        dy = grad_y.contiguous()
        grad_x = torch.empty_like(dy) if needs[1] else None
        shape, dtype = ctx.scores_like
        grad_scores = torch.empty(shape, dtype=dtype, device=dy.device) if needs[3] else None
        distmoe.routed_experts_backward(
            call.context,
            call.saved_forward,
            dy,
            **_operands(call, used),
            grad_x=grad_x,
            grad_scores=grad_scores,
            **{f"grad_{name}": place for name, place in places.items()},
            accumulate=added,
            stream=stream_of(dy),
        )
        call.finish()
        delivered = call.deliver(places)
        weight_gradients = [
            _as_argument(delivered.get(name), weight)
            for name, weight in zip(WEIGHT_NAMES, given, strict=True)
        ]
        return (None, grad_x, None, grad_scores, *weight_gradients), [anchor]


def _as_argument(gradient, weight):
    """A gradient in the shape of the argument that it belongs to."""
    if gradient is None or gradient.shape == weight.shape:
        return gradient
    return gradient.reshape(weight.shape)
