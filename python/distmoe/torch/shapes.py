# SPDX-License-Identifier: Apache-2.0
"""What a call refuses of tensors without memory, so that compilers find it when they trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import distmoe
from distmoe.torch.context import Context
from distmoe.torch.weights import Weights

_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.bool: "bool",
}


def check_one_device(*arguments: object) -> None:
    """What the core finds for real tensors; a meta tensor among real ones comes here."""
    devices = {str(each.device) for each in arguments if isinstance(each, Tensor)}
    if len(devices) > 1:
        raise distmoe.InvalidArgumentError(
            f"the tensors of a call must be on one device, got {', '.join(sorted(devices))}"
        )


def check_forward(
    own: Context,
    x: Tensor,
    topk_ids: Tensor,
    topk_scores: Tensor,
    weights: Weights,
    y: Tensor,
    *,
    norm: distmoe.PostExpertNorm | None = None,
    **clip: object,
) -> None:
    """Raises what a call with tensors of these types, shapes, strides and devices would."""

    def shape_of(name: str, tensor: Tensor | None) -> distmoe.TensorShape | None:
        return None if tensor is None else _shape_of(name, tensor, own)

    w13, w2, bias13, bias2 = weights.given
    given = (shape_of("w13", w13), shape_of("w2", w2))
    given += (shape_of("bias13", bias13), shape_of("bias2", bias2))
    prepared = [_shape_of("a prepared weight", tensor, own) for tensor in weights.prepared]
    if norm is not None:
        norm = distmoe.PostExpertNorm(
            eps=norm.eps,
            gamma=shape_of("norm.gamma", norm.gamma),
            gain_center=norm.gain_center,
            uses_kahan=norm.uses_kahan,
        )
    if "clip_counts" in clip:
        clip["clip_counts"] = shape_of("clip_counts", clip["clip_counts"])
    distmoe.check_routed_experts(
        own.core,
        shape_of("x", x),
        shape_of("topk_ids", topk_ids),
        shape_of("topk_scores", topk_scores),
        y=shape_of("y", y),
        norm=norm,
        **Weights(given, prepared).core_arguments(own.config),
        **clip,
    )


def check_grad_y(own: Context, dy: Tensor) -> None:
    """Of a backward, whose other shapes the forward has checked."""
    width = own.config.hidden_dim
    if dy.ndim != 2 or dy.shape[1] != width:
        raise distmoe.InvalidArgumentError(f"dy must have shape [T, {width}], got {list(dy.shape)}")
    if dy.dtype != torch.bfloat16:
        raise distmoe.InvalidArgumentError(f"dy must be bf16, got {dtype_name(dy.dtype)}")


def dtype_name(dtype: torch.dtype) -> str:
    """As the library's messages have it."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _shape_of(name: str, tensor: Tensor, own: Context) -> distmoe.TensorShape:
    if tensor.dtype not in _NAMES:
        raise distmoe.UnsupportedError(
            f"{name}: no distmoe type for elements of {dtype_name(tensor.dtype)}"
        )
    if not 1 <= tensor.ndim <= 4:
        raise distmoe.InvalidArgumentError(
            f"{name}: a tensor has {tensor.ndim} dimensions; 1 to 4 are supported"
        )
    # A shape that is computed alone, on meta, stands for tensors where the context is.
    device = own.device if tensor.device.type == "meta" else tensor.device
    return distmoe.TensorShape(
        _NAMES[tensor.dtype],
        numbers(tensor.shape, own.config.max_tokens),
        numbers(tensor.stride(), own.config.max_tokens),
        -1 if device.type == "cpu" else device.index or 0,
    )


def numbers(extents: Sequence[int], unknown: int) -> list[int]:
    """Of symbols the values that they were traced with; `unknown` for one without."""
    values = []
    for extent in extents:
        if isinstance(extent, torch.SymInt):
            has_value = extent.node.has_hint()
            values.append(int(extent.node.hint) if has_value else unknown)
        else:
            values.append(int(extent))
    return values
