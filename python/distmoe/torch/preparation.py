# SPDX-License-Identifier: Apache-2.0
"""Quantising weights once, for many calls, as operators that graphs may hold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import distmoe
from distmoe.torch import shapes
from distmoe.torch.operators import library
from distmoe.torch.refusals import check_types
from distmoe.torch.weights import PreparedWeight

_USE = "str format, bool inference, str gate_up_layout"
library.define(
    f"prepare_block_scaled_weight(Tensor weight, {_USE})"
    " -> (Tensor codes, Tensor scales, Tensor global_scales)"
)
library.define(
    f"refill_prepared_weight(Tensor weight, {_USE}, Tensor(a!) codes, Tensor(b!) scales,"
    " Tensor(c!) global_scales) -> ()"
)


def _places(
    weight: Tensor, format: str, inference: bool, gate_up_layout: str
) -> tuple[Tensor, ...]:
    """Codes, scales and global scales, not filled; the last is empty where a format has none."""
    if weight.ndim not in (3, 4):
        raise distmoe.InvalidArgumentError(
            "a weight to prepare must have shape [L, N, K] or [L, 2, F, D], got"
            f" {list(weight.shape)}"
        )
    experts, columns = weight.shape[0], weight.shape[-1]
    rows = weight.shape[1:-1].numel()
    scale_rows = rows // 32 if format == "mxfp8" and not inference else rows
    is_nvfp4 = format == "nvfp4"
    code_columns = columns if format == "mxfp8" else columns // 2
    scale_columns = columns // (16 if is_nvfp4 else 32)
    return (
        weight.new_empty((experts, rows, code_columns), dtype=torch.uint8),
        weight.new_empty((experts, scale_rows, scale_columns), dtype=torch.uint8),
        weight.new_empty((experts, 1) if is_nvfp4 else (0,), dtype=torch.float32),
    )


def _check(weight: Tensor, format: str, inference: bool, gate_up_layout: str) -> None:
    """What the core refuses of a real weight of this type, shape and strides."""
    text = f"{shapes.dtype_name(weight.dtype)} {list(weight.shape)}"
    if weight.dtype != torch.bfloat16:
        raise distmoe.InvalidArgumentError(f"a weight to prepare must be bf16, got {text}")
    if weight.shape[-1] > 1 and weight.stride(-1) != 1:
        raise distmoe.InvalidArgumentError(
            f"a weight to prepare needs stride 1 in its last dimension, got {text} with strides"
            f" {list(weight.stride())}"
        )
    # The rest does not depend on the experts: it is that of a weight of none.
    dims = [0, *shapes.numbers(weight.shape[1:], 32)]
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    distmoe.prepare_block_scaled_weight(
        distmoe.TensorShape("bf16", dims, strides),
        format,
        inference=inference,
        gate_up_layout=gate_up_layout,
    )


def _fake_prepare(weight: Tensor, *use) -> tuple[Tensor, ...]:
    places = _places(weight, *use)
    _check(weight, *use)
    return places


def _fake_refill(weight: Tensor, format: str, inference: bool, layout: str, *places) -> None:
    for name, place, expected in zip(
        ("codes", "scales", "global scales"),
        places,
        _fake_prepare(weight, format, inference, layout),
        strict=True,
    ):
        if place.shape != expected.shape or place.dtype != expected.dtype:
            raise distmoe.InvalidArgumentError(
                f"{name} of out must be {shapes.dtype_name(expected.dtype)} {list(expected.shape)},"
                f" got {shapes.dtype_name(place.dtype)} {list(place.shape)}"
            )


def _prepare(
    weight: Tensor, format: str, inference: bool, gate_up_layout: str
) -> tuple[Tensor, ...]:
    places = _places(weight, format, inference, gate_up_layout)
    _refill(weight, format, inference, gate_up_layout, *places)
    return places


def _refill(
    weight: Tensor, format: str, inference: bool, gate_up_layout: str, *places: Tensor
) -> None:
    out = _weight_in(places, weight, format, inference, gate_up_layout)
    distmoe.refill_prepared_weight(weight, out.core())


def _weight_in(
    places: Sequence[Tensor], source: Tensor, format: str, inference: bool, gate_up_layout: str
) -> PreparedWeight:
    """In what `_places` made."""
    codes, scales, global_scales = places
    return PreparedWeight(
        source,
        format,
        codes,
        scales,
        global_scales if format == "nvfp4" else None,
        inference=inference,
        gate_up_layout=gate_up_layout,
    )


# Whatever memory it is in: a weight on a GPU is the core's to refuse.
library.impl("prepare_block_scaled_weight", _prepare, "CPU")
library.impl("prepare_block_scaled_weight", _prepare, "CUDA")
library.impl("refill_prepared_weight", _refill, "CPU")
library.impl("refill_prepared_weight", _refill, "CUDA")
torch.library.register_fake("distmoe::prepare_block_scaled_weight", _fake_prepare, lib=library)
torch.library.register_fake("distmoe::refill_prepared_weight", _fake_refill, lib=library)

prepare_op = torch.ops.distmoe.prepare_block_scaled_weight.default
refill_op = torch.ops.distmoe.refill_prepared_weight.default


def prepare_block_scaled_weight(
    weight: Tensor,
    format: str,
    *,
    inference: bool = False,
    gate_up_layout: str = "concatenated",
) -> PreparedWeight:
    """Quantises a BF16 weight [L, N, K] (W13 also as [L, 2, F, D]) once, for contexts of `format`.

    Calls have the bits of calls with `weight` itself.
    """
    check_types(Tensor, weight=weight)
    use = (format, inference, gate_up_layout)
    return _weight_in(prepare_op(weight.detach(), *use), weight, *use)


def refill_prepared_weight(weight: Tensor, out: PreparedWeight) -> None:
    """The same into memory that is there, whose addresses stay; `weight` is the source then."""
    check_types(Tensor, weight=weight)
    check_types(PreparedWeight, out=out)
    global_scales = weight.new_empty(0) if out.global_scales is None else out.global_scales
    use = (out.format, out.inference, out.gate_up_layout)
    refill_op(weight.detach(), *use, out.codes, out.scales, global_scales)
    out.source = weight
