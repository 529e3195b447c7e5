# SPDX-License-Identifier: Apache-2.0
"""The call that models make."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

import distmoe
from distmoe.torch import autograd, operators  # noqa: F401  autograd registers itself
from distmoe.torch.context import Context
from distmoe.torch.eager import current_stream, needs_backward
from distmoe.torch.refusals import check_strided, check_types, is_traced, refuse_unless_begun
from distmoe.torch.weights import PreparedWeight, split


def routed_experts(
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    w13: Tensor | PreparedWeight,
    w2: Tensor | PreparedWeight,
    context: Context,
    *,
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    norm: distmoe.PostExpertNorm | None = None,
    clip_limit: float | None = None,
    accumulate_wgrad: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """What the experts that a token names answer, weighted by the scores: BF16 [T, D].

    Collective over the ranks of `context`. Where gradients are enabled and an input requires one,
    the forward keeps in the context's selected activation slot what its backward needs; otherwise,
    with the same bits, no slot is touched. Backwards come in the reverse order of their forwards.

    `w13` and `w2` may be weights that were prepared for the context's precision. With a
    `clip_limit` the answer is (y, counts): int64 [3], how many gates of the rows on this rank are
    above it, how many |ups|, and of how many. `accumulate_wgrad`: backward adds the weights'
    gradients to the parameters' `.grad` where there is one, in place and rounded once; eager alone.
    """
    if not isinstance(context, Context):
        raise TypeError(
            f"context is {type(context).__name__}; it must be a distmoe.torch.Context, which"
            " create_context makes"
        )
    given = (x, topk_ids, topk_scores, w13, w2, bias13, bias2)
    options = (norm, clip_limit, accumulate_wgrad)
    if is_compiling():
        _check_types(*given, *options)
        return _call(context, *given, *options)
    num_begun = context.core.num_begun_calls
    try:
        return _call(context, *given, *options)
    except Exception as error:
        if is_traced(*given):
            raise
        stream = current_stream(context.device)
        refuse_unless_begun(
            context.core, num_begun, _wrong_kind(*given, *options) or error, stream=stream
        )


def _call(
    context, x, topk_ids, topk_scores, w13, w2, bias13, bias2, norm, clip_limit, accumulate_wgrad
):
    norm_options = (0.0, False, None, 0.0)  # an eps that no norm may have
    if norm is not None:
        if not norm.eps > 0:
            raise distmoe.InvalidArgumentError(
                f"norm.eps is {norm.eps}; legal is a finite number > 0"
            )
        norm_options = (norm.eps, norm.uses_kahan, norm.gamma, norm.gain_center)
    w13, w2, prepared = split(w13, w2, context.config)
    call = operators.routed_experts_op
    gamma = norm_options[2]
    if not is_compiling() and not needs_backward(x, topk_scores, w13, w2, bias13, bias2, gamma):
        call = autograd.below_autograd  # saves a way through Python
    y, counts = call(
        x,
        topk_ids,
        topk_scores,
        w13,
        w2,
        bias13,
        bias2,
        prepared,
        *norm_options,
        clip_limit,
        context.number,
        accumulate_wgrad,
    )
    return y if clip_limit is None else (y, counts)


def _check_types(
    x, topk_ids, topk_scores, w13, w2, bias13, bias2, norm, clip_limit, accumulate_wgrad
) -> None:
    nothing = type(None)
    check_types(Tensor, x=x, topk_ids=topk_ids, topk_scores=topk_scores)
    check_types((Tensor, PreparedWeight), w13=w13, w2=w2)
    check_types((Tensor, nothing), bias13=bias13, bias2=bias2)
    check_types((distmoe.PostExpertNorm, nothing), norm=norm)
    check_types((float, int, nothing), clip_limit=clip_limit)
    check_types(bool, accumulate_wgrad=accumulate_wgrad)
    check_strided(
        x=x, topk_ids=topk_ids, topk_scores=topk_scores, w13=w13, w2=w2, bias13=bias13, bias2=bias2
    )


def _wrong_kind(*arguments: object) -> TypeError | distmoe.InvalidArgumentError | None:
    try:
        _check_types(*arguments)
    except (TypeError, distmoe.InvalidArgumentError) as error:
        return error
    return None
