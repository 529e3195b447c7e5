# SPDX-License-Identifier: Apache-2.0
"""The call: dist_moe's checks in their order, then the way of distmoe that the options need."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

import distmoe.torch
from distmoe.dist_moe.callbacks import PostprocessAndCombine, RepeatTokens
from distmoe.dist_moe.context import Context
from distmoe.dist_moe.hooks import HookedCall
from distmoe.dist_moe.layouts import as_matrices
from distmoe.dist_moe.norm import core_norm, output_gradient
from distmoe.dist_moe.options import ExecutionOptions
from distmoe.dist_moe.owners import check_wgrad_dtypes
from distmoe.dist_moe.prepared import PreparedWeight
from distmoe.torch.eager import (
    EagerCall,
    current_stream,
    needs_backward,
    run,
    run_saving,
    stream_of,
)
from distmoe.torch.refusals import (
    agree,
    check_strided,
    check_types,
    is_traced,
    refuse,
    refuse_unless_begun,
)


def routed_experts(
    x_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    scores_TK: torch.Tensor,
    w13: torch.Tensor | PreparedWeight,
    w2: torch.Tensor | PreparedWeight,
    context: Context,
    *,
    options: ExecutionOptions | None = None,
) -> torch.Tensor:
    """What the experts that a token names answer, weighted by the scores: BF16 [T, D].

    Collective over the ranks of `context`; all of them give the same kinds of programs.
    """
    check_types(Context, context=context)
    if options is None:
        options = ExecutionOptions()
    given = (x_TD, ids_TK, scores_TK, w13, w2)
    if torch.compiler.is_compiling():  # the operator finds a context that is closed
        return _run(*given, context, options)
    context._check_open()
    core = context.core_of(options)
    num_begun = core.num_begun_calls
    try:
        return _run(*given, context, options)
    except Exception as error:
        if is_traced(*given):
            raise
        stream = current_stream(context.device)
        refuse_unless_begun(core, num_begun, error, stream=stream)


def _check_types(x, ids, scores, w13, w2, options) -> None:
    check_types(torch.Tensor, x=x, ids=ids, scores=scores)
    check_types((torch.Tensor, PreparedWeight), w13=w13, w2=w2)
    check_types(ExecutionOptions, options=options)
    check_strided(x=x, ids=ids, scores=scores, w13=w13, w2=w2)


def _run(x_TD, ids_TK, scores_TK, w13, w2, context: Context, options) -> torch.Tensor:
    _check_types(x_TD, ids_TK, scores_TK, w13, w2, options)
    _check_clip(x_TD, context, options)
    _check_shapes(x_TD, ids_TK, scores_TK, context)
    prepared = _check_prepared(w13, w2, context, options)
    if prepared:
        w13, w2 = w13.source, w2.source
    weights = (w13, w2)
    if options.weights_preprocess_fn is None:
        weights = as_matrices(w13, w2, context.inner.num_local_experts, context.inner.config)
    _check_tensors(x_TD, ids_TK, scores_TK)
    _check_devices(x_TD, ids_TK, scores_TK, w13, w2)
    norm = options.norm
    _check_inference(context, x_TD, scores_TK, w13, w2, None if norm is None else norm.weight)
    if options.requires_eager and _is_traced(x_TD):
        raise RuntimeError("these ExecutionOptions run Python in the call: they require eager mode")
    if options.inplace_wgrad_accum and torch.is_grad_enabled() and not _is_traced(x_TD):
        check_wgrad_dtypes(options, dict(w13=w13, w2=w2), context.config.wgrad_dtype)
    inputs = (x_TD, ids_TK, scores_TK)
    if options.callback is not None:
        return _run_with_callback(context, options, prepared, *inputs, w13, w2)
    fused = None
    if norm is not None:
        fused = core_norm(norm, x_TD, scores_TK, inference=context.config.inference)
    if options.requires_eager or options.wgrad_parameter_owners is not None:
        return _run_hooked(context, options, prepared, fused, *inputs, w13, w2)
    counts = options.swiglu_clip_stats_out_3
    answer = distmoe.torch.routed_experts(
        *inputs,
        *(prepared or weights),
        context.inner,
        norm=fused,
        clip_limit=None if counts is None else float(options.swiglu_clip_limit),
        accumulate_wgrad=options.inplace_wgrad_accum,
    )
    if counts is None:
        return answer
    y, counted = answer
    counts.copy_(counted)
    return y


# --- checks ---


def _check_clip(x, context: Context, options: ExecutionOptions) -> None:
    counts = options.swiglu_clip_stats_out_3
    if counts is None:
        return
    if counts.device != x.device:
        raise ValueError(f"swiglu_clip_stats_out_3 is on {counts.device}, x on {x.device}")
    if context.config.block_scaled is not None:
        raise ValueError("swiglu_clip_stats_out_3 is for BF16 contexts")


def _check_shapes(x, ids, scores, context: Context) -> None:
    if x.ndim != 2 or x.shape[1] != context.hidden_dim:
        raise ValueError(f"x must be [T, {context.hidden_dim}], got {list(x.shape)}")
    tokens, exact = x.shape[0], context.config.num_local_input_tokens
    if exact is not None and tokens != exact:
        raise ValueError(f"the tokens of x must equal num_local_input_tokens={exact}, got {tokens}")
    most = context.max_num_local_input_tokens
    if not 1 <= tokens <= most:
        raise ValueError(f"the tokens of x must be in [1, {most}], got {tokens}")
    expected = (tokens, context.top_k)
    for name, tensor in (("ids", ids), ("scores", scores)):
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} must be {list(expected)}, got {list(tensor.shape)}")


def _check_prepared(
    w13, w2, context: Context, options: ExecutionOptions
) -> list[distmoe.torch.PreparedWeight]:
    """What to compute with; empty for weights that are not prepared."""
    is_prepared = [isinstance(weight, PreparedWeight) for weight in (w13, w2)]
    if not any(is_prepared):
        return []
    if not all(is_prepared):
        raise TypeError("w13 and w2 must both be prepared weights, or neither")
    if context.config.block_scaled is None:
        raise ValueError("prepared weights need a context with block_scaled")
    if options.weights_preprocess_fn is not None:
        raise ValueError("weights_preprocess_fn is not for prepared weights")
    return [w13.for_calls(), w2.for_calls()]


def _check_tensors(x, ids, scores) -> None:
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x must be torch.bfloat16, got {x.dtype}")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids must be torch.int32 or torch.int64, got {ids.dtype}")
    if scores.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"scores must be torch.bfloat16 or torch.float32, got {scores.dtype}")
    for name, tensor in (("x", x), ("ids", ids), ("scores", scores)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def _check_devices(*tensors) -> None:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")


def _check_inference(context: Context, *tensors) -> None:
    if not context.config.inference:
        return
    if any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise RuntimeError("an inference context takes no tensor that requires grad")


def _is_traced(x: torch.Tensor) -> bool:
    return (
        torch.compiler.is_compiling() or isinstance(x, FakeTensor) or get_proxy_mode() is not None
    )


# --- ways ---


def _saving_or_not(call: HookedCall, x, ids, scores, w13, w2) -> torch.Tensor:
    arguments = (x, ids, scores, w13, w2, None, None)
    if needs_backward(x, scores, w13, w2):
        return run_saving(call, *arguments)
    return run(call, *arguments)


def _run_hooked(context, options, prepared, fused, x, ids, scores, w13, w2) -> torch.Tensor:
    core_options = _clip(options) | ({} if fused is None else dict(norm=fused))
    arguments = dict(w13=w13, w2=w2)
    call = HookedCall(context.inner.core, options, arguments, prepared, **core_options)
    y = _saving_or_not(call, x, ids, scores, w13, w2)
    norm = options.norm
    if norm is not None and norm.has_observer:
        rows = _rows_to_observe(context, x, ids, call.used)
        with _agreed(call, x):
            _observe(context, norm, rows, y, ids, scores)
    return y


@contextlib.contextmanager
def _agreed(call: HookedCall, x: torch.Tensor) -> Iterator[None]:
    """Around a program of the caller that runs after the ranks met.

    Where it raises on any rank, all raise, and what the call saved is discarded.
    """
    meet = functools.partial(agree, call.context, saved=call.saved_forward, stream=stream_of(x))
    try:
        yield
    except Exception as error:
        meet(error)
    else:
        meet(None)


def _routes_of(x, ids):
    """Every route as a token: ids [T * K, 1] and scores of 1."""
    ones = torch.ones(ids.numel(), 1, dtype=torch.float32, device=x.device)
    return ids.reshape(-1, 1), ones


def _run_with_callback(context, options, prepared, x, ids, scores, w13, w2) -> torch.Tensor:
    route_ids, ones = _routes_of(x, ids)
    arguments, core = dict(w13=w13, w2=w2), context.routes().core
    call = HookedCall(core, options, arguments, prepared, **_clip(options))
    rows = _saving_or_not(call, RepeatTokens.apply(x, context.top_k), route_ids, ones, w13, w2)
    with _agreed(call, x):
        y = PostprocessAndCombine.apply(rows, scores, ids, options.callback, core)
    return y


def _clip(options: ExecutionOptions) -> dict:
    if options.swiglu_clip_stats_out_3 is None:
        return {}
    return dict(
        clip_counts=options.swiglu_clip_stats_out_3, clip_limit=float(options.swiglu_clip_limit)
    )


@torch.no_grad()
def _rows_to_observe(context, x, ids, weights) -> torch.Tensor:
    """What the fused call kept to itself, computed once more."""
    route_ids, ones = _routes_of(x, ids)
    repeated = x.repeat_interleave(context.top_k, 0)
    return run(EagerCall(context.routes().core), repeated, route_ids, ones, *weights)


@torch.no_grad()
def _observe(context, norm, rows, y, ids, scores) -> None:
    if norm.observe_expert_output_fn is not None:
        norm.observe_expert_output_fn(rows)
    observe_grad = norm.observe_expert_output_grad_fn
    if observe_grad is None or not y.requires_grad:
        return
    kept_scores = scores.detach().masked_fill(ids < 0, 0.0)

    def on_gradient(grad_y: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                observe_grad(rows, output_gradient(rows, kept_scores, grad_y, norm.eps))
        except Exception as error:  # before the backward that the peers make
            core = context.inner.core
            refuse(core, error, stream=current_stream(context.device), is_backward=True)

    y.register_hook(on_gradient)
