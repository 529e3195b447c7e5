# SPDX-License-Identifier: Apache-2.0
"""Matrices as codes and block scales, as block-scaled contexts quantise them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from distmoe import _core


@dataclass(frozen=True, kw_only=True)
class QuantisedMatrix:
    """A matrix [R, C] as tensors of bits in the layouts of docs/formats.md.

    `codes` and `scales` are uint8, `factors` FP32 [R] for NVFP4 and None for the others. They are
    what `numpy.from_dlpack` and `torch.from_dlpack` take, and may be tensors of yours.
    """

    format: Literal["mxfp8", "mxfp4", "nvfp4"]
    blocks: Literal["rows", "columns", "tiles"] = "rows"
    num_columns: int
    codes: Any
    scales: Any
    factors: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: _packed(value) for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({name: _unpacked(value) for name, value in state.items()})


class _PackedArray(NamedTuple):
    """What `quantise` made, as it is pickled and copied."""

    bits: bytes
    shape: tuple[int, ...]
    is_float: bool


def _packed(value: Any) -> Any:
    if type(value).__module__ != "nanobind":  # a tensor of the caller's, who knows how
        return value
    view = memoryview(value)
    return _PackedArray(view.tobytes(), view.shape, view.format == "f")


def _unpacked(value: Any) -> Any:
    return _core.array_of_bytes(*value) if isinstance(value, _PackedArray) else value


def quantise(
    values: Any,
    format: Literal["mxfp8", "mxfp4", "nvfp4"],
    blocks: Literal["rows", "columns", "tiles"] = "rows",
) -> QuantisedMatrix:
    """Quantises a BF16 matrix in host memory; columns and tiles are MXFP8's."""
    codes, scales, factors = _core.quantise(values, format, blocks)
    return QuantisedMatrix(
        format=format,
        blocks=blocks,
        num_columns=_num_columns(values),
        codes=codes,
        scales=scales,
        factors=factors,
    )


def dequantise(matrix: QuantisedMatrix) -> Any:
    """The values of `matrix`, FP32 [R, C]: exact, but for NVFP4, where they are rounded once."""
    if not isinstance(matrix, QuantisedMatrix):
        raise TypeError(f"matrix is {type(matrix).__name__}; it must be a QuantisedMatrix")
    return _core.dequantise(
        matrix.codes,
        matrix.scales,
        matrix.factors,
        matrix.format,
        matrix.blocks,
        matrix.num_columns,
    )


def _num_columns(values: Any) -> int:
    array = values.array if isinstance(values, _core.Reinterpreted) else values
    return array.shape[1]
