# SPDX-License-Identifier: Apache-2.0
"""The forward of an experts module, as transformers' experts interface calls it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from distmoe.errors import InvalidArgumentError, UnsupportedError
from distmoe.torch.eager import needs_backward, run, run_saving
from distmoe.transformers.contexts import ContextPool, ExpertsOptions, Geometry
from distmoe.transformers.gate import gate_of
from distmoe.transformers.prepared import prepared_weights

# The pool of a module lives as long as the module; modules of one model share theirs.
_POOL_OF_MODULE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_POOLS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


def make_experts_forward(options: ExpertsOptions) -> Callable[..., torch.Tensor]:
    """What transformers calls in place of a module's own forward."""

    @torch.compiler.disable
    def distmoe_experts_forward(
        module: torch.nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        weights = _weights_of(module)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            weights = [None if weight is None else weight.to(dtype) for weight in weights]
        _check_dtypes(module, x, *weights[:2])
        ids = top_k_index
        if module._is_expert_parallel:  # ids of other ranks' experts are num_experts and above
            ids = ids.masked_fill(ids >= weights[0].shape[0], -1)
        pool = _pool_of(module, options, weights, top_k_index.shape[-1])
        scores = top_k_weights.contiguous()
        inputs = (x.contiguous(), ids.contiguous(), scores)
        if needs_backward(x, scores, *weights):
            call = pool.for_training(id(module), x.shape[0])
            y = run_saving(call, *inputs, *weights)
        else:
            if options.precision != "bf16":
                layout = pool.geometry.gate.gate_up_layout
                weights[:2] = prepared_weights(module, options.precision, layout, *weights[:2])
            y = run(pool.for_forward(x.shape[0]), *inputs, *weights)
        return y.view(hidden_states.shape).to(hidden_states.dtype)

    return distmoe_experts_forward


def _weights_of(module: torch.nn.Module) -> list[torch.Tensor | None]:
    """w13, w2, bias13 and bias2 with the output rows outside, as distmoe reads them."""
    if module.has_post_expert_norm or not module.has_gate:
        what = "a norm after each expert" if module.has_gate else "no gate"
        raise UnsupportedError(f"{type(module).__name__} has {what}, which distmoe cannot run")
    weights = [module.gate_up_proj, module.down_proj]
    if module.is_transposed:
        weights = [weight.transpose(1, 2).contiguous() for weight in weights]
    if module.has_bias:
        return [*weights, module.gate_up_proj_bias, module.down_proj_bias]
    return [*weights, None, None]


def _check_dtypes(module: torch.nn.Module, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16:
            raise InvalidArgumentError(
                f"{type(module).__name__} got {tensor.dtype} {list(tensor.shape)}; distmoe computes"
                " in torch.bfloat16: load the model with dtype=torch.bfloat16 or use autocast"
            )


def _pool_of(
    module: torch.nn.Module,
    options: ExpertsOptions,
    weights: list[torch.Tensor | None],
    top_k: int,
) -> ContextPool:
    w13, w2 = weights[:2]
    facts = (options, w13.shape, w2.shape, w13.device, top_k)
    pool, known = _POOL_OF_MODULE.get(module, (None, None))
    if facts == known:
        return pool
    geometry = Geometry(
        hidden_dim=w2.shape[1],
        intermediate_dim=w2.shape[2],
        top_k=top_k,
        num_experts=w2.shape[0],
        num_layers=module.config.num_hidden_layers,
        gate=gate_of(module, w2.shape[2]),
        device=w13.device,
    )
    # The module's config is the model's, whose identity tells models apart.
    key = (id(module.config), geometry, options)
    pool = _POOLS.get(key)
    if pool is None:
        pool = ContextPool(geometry, options, module.config)
        _POOLS[key] = pool
    _POOL_OF_MODULE[module] = (pool, facts)
    return pool
