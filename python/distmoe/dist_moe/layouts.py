# SPDX-License-Identifier: Apache-2.0
"""The layouts of a rank's weights: three dimensions, W13 with gate and up apart, or flattened."""

from __future__ import annotations

import torch

import distmoe


def as_matrices(
    w13: torch.Tensor, w2: torch.Tensor, num_experts: int, config: distmoe.Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """W13 as [EL, 2F, D] and W2 as [EL, D, F], checked."""
    _check_types(w13=w13, w2=w2)
    width, depth = config.hidden_dim, config.intermediate_dim
    dims = (w13.ndim, w2.ndim)
    if dims == (4, 3):
        if w13.shape[1] != 2:
            raise ValueError(
                f"w13 [EL, 2, F, D] must have 2 in its second dimension: {list(w13.shape)}"
            )
    elif dims not in ((3, 3), (2, 2)):
        raise ValueError(
            f"weights must be [EL, 2F, D] and [EL, D, F], [EL, 2, F, D] and [EL, D, F], or both"
            f" flattened to two dimensions, got {list(w13.shape)} and {list(w2.shape)}"
        )
    expected = {
        2: (num_experts * 2 * depth, width),
        3: (num_experts, 2 * depth, width),
        4: (num_experts, 2, depth, width),
    }[w13.ndim]
    if tuple(w13.shape) != expected:
        raise ValueError(f"w13 must be {list(expected)}, got {list(w13.shape)}")
    expected = (num_experts * width, depth) if w2.ndim == 2 else (num_experts, width, depth)
    if tuple(w2.shape) != expected:
        raise ValueError(f"w2 must be {list(expected)}, got {list(w2.shape)}")
    for name, weight in (("w13", w13), ("w2", w2)):
        if not weight.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(weight.stride())}")
    return (
        _as_shape(w13, num_experts, 2 * depth, width),
        _as_shape(w2, num_experts, width, depth),
    )


def _as_shape(weight: torch.Tensor, *shape: int) -> torch.Tensor:
    """A parameter that has the shape stays what it is: gradients pass a view in the view's type."""
    return weight if tuple(weight.shape) == shape else weight.view(shape)


def _check_types(**weights: torch.Tensor) -> None:
    for name, weight in weights.items():
        if weight.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be torch.bfloat16, got {weight.dtype}")
