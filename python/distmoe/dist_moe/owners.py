# SPDX-License-Identifier: Apache-2.0
"""The parameters to whose gradients a backward adds those of the weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distmoe.dist_moe.options import ExecutionOptions


def owners_of(
    options: ExecutionOptions, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Those of w13 and w2: what the options name, else a weight, or what it is a view of."""
    owners = {name: _base(weights[name]) for name in ("w13", "w2")}
    if options.wgrad_parameter_owners is not None:
        owners = dict(zip(owners, options.wgrad_parameter_owners, strict=True))
    for name, owner in owners.items():
        if not owner.is_leaf:
            raise ValueError(f"the owner of {name}'s gradient must be a leaf, got {owner.grad_fn}")
        if not owner.requires_grad:
            raise ValueError(
                f"the owner of {name}'s gradient must be a parameter that needs gradients"
            )
    return owners


def _base(weight: torch.Tensor) -> torch.Tensor:
    return weight if weight._base is None else weight._base


def check_wgrad_dtypes(
    options: ExecutionOptions,
    weights: Mapping[str, torch.Tensor],
    configured: torch.dtype | None,
) -> None:
    """That in-place accumulation into these gradients is one for both, and in a type that it has.

    Of weights alone, without named owners, those that are frozen have no gradient to add to.
    """
    if options.wgrad_parameter_owners is not None:
        owners = owners_of(options, weights)
    else:
        bases = {name: _base(weight) for name, weight in weights.items()}
        owners = {name: each for name, each in bases.items() if each.is_leaf and each.requires_grad}
    dtypes = {name: _wgrad_dtype(name, owner, configured) for name, owner in owners.items()}
    if len(set(dtypes.values())) > 1:
        raise RuntimeError(
            f"w13 and w2 have different WGRAD dtypes: {dtypes['w13']} and {dtypes['w2']}"
        )


def _wgrad_dtype(name: str, owner: torch.Tensor, configured: torch.dtype | None) -> torch.dtype:
    declared = getattr(owner, "grad_dtype", None)  # PyTorch 2.11 has it
    if declared is not None and configured is not None and declared != configured:
        raise RuntimeError(
            f"the owner of {name}'s gradient has grad_dtype {declared}, but Config.wgrad_dtype is"
            f" {configured}"
        )
    existing = owner.dtype if owner.grad is None else owner.grad.dtype
    dtype = declared or configured or existing
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"the gradient of {name}'s owner must be bfloat16 or float32, got {dtype}")
    if owner.grad is not None and owner.grad.dtype != dtype:
        raise RuntimeError(
            f"the gradient of {name}'s owner must be {dtype} to be added to, got {existing}"
        )
    return dtype
