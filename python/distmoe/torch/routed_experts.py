# SPDX-License-Identifier: Apache-2.0
"""The call that models make."""

from __future__ import annotations

from torch import Tensor

import distmoe
from distmoe.torch import autograd, operators  # noqa: F401  autograd registers itself
from distmoe.torch.context import Context
from distmoe.torch.eager import needs_backward


def _refuse(tensors: dict[str, Tensor | None]) -> None:
    names = [name for name, t in tensors.items() if t is not None and t.requires_grad]
    raise distmoe.InvalidArgumentError(
        f"{', '.join(names)} require(s) grad, but the context is for inference (Config.inference):"
        " call it under torch.no_grad(), or make a context for training"
    )


def routed_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    w13: Tensor,
    w2: Tensor,
    context: Context,
    *,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    norm: distmoe.PostExpertNorm | None = None,
    accumulate_wgrad: bool = False,
) -> Tensor:
    """What the experts that a token names answer, weighted by the scores: BF16 [T, D].

    Collective over the ranks of `context`. Where gradients are enabled and an input requires one,
    the forward keeps in the context's selected activation slot what its backward needs; otherwise,
    with the same bits, no slot is touched. Backwards come in the reverse order of their forwards.

    `accumulate_wgrad`: backward adds the weights' gradients to the parameters' `.grad` where there
    is one, in place and rounded once; eager alone. `norm`: its eps and uses_kahan; gamma is for the
    core's routed_experts.
    """
    if not isinstance(context, Context):
        raise TypeError(
            f"context is {type(context).__name__}; it must be a distmoe.torch.Context, which"
            " create_context makes"
        )
    eps, uses_kahan = 0.0, False
    if norm is not None:
        if norm.gamma is not None:
            raise distmoe.UnsupportedError("the PyTorch operators take no norm.gamma")
        eps, uses_kahan = norm.eps, norm.uses_kahan
        if not eps > 0:
            raise distmoe.InvalidArgumentError(f"norm.eps is {eps}; legal is a finite number > 0")
    if not needs_backward(x, topk_scores, w13, w2, bias13, bias2):
        return operators.routed_experts_op(
            x, topk_ids, topk_scores, w13, w2, bias13, bias2, eps, uses_kahan, context.number
        )
    if context.inference:
        _refuse(dict(x=x, topk_scores=topk_scores, w13=w13, w2=w2, bias13=bias13, bias2=bias2))
    y, _ = operators.saving_routed_experts_op(
        x,
        topk_ids,
        topk_scores,
        w13,
        w2,
        bias13,
        bias2,
        eps,
        uses_kahan,
        context.number,
        accumulate_wgrad,
    )
    return y
