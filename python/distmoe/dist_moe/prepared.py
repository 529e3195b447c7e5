# SPDX-License-Identifier: Apache-2.0
"""Weights that were quantised ahead of calls, in dist_moe's fields."""

from __future__ import annotations

import torch

import distmoe.torch
from distmoe.dist_moe.block_scaled import BlockScaledConfig, BlockScaledFormat

_MAKER = object()


class PreparedWeight:
    """A weight [G, N, K] as codes and scales; made by `prepare_block_scaled_weight`.

    MXFP8: `fprop_data` [G, N, K] in E4M3, `fprop_scale` [G * N, K / 32] in E8M0, and for training
    `dgrad_data`, the same codes, with `dgrad_scale` [G * K, N / 32]. NVFP4: `fprop_data`
    [G, N, K / 2] with two codes a byte, `fprop_scale` [G * N, K / 16] in E4M3, and per expert the
    factor of its codes and its inverse. Scales lie row by row. Calls read `fprop_data`,
    `fprop_scale` and `global_scale_inv`; `source` gets the gradient and is not read.
    """

    source: torch.Tensor
    format: BlockScaledFormat
    fprop_data: torch.Tensor
    fprop_scale: torch.Tensor
    dgrad_data: torch.Tensor | None
    dgrad_scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    global_scale_inv: torch.Tensor | None

    def __init__(self, maker: object = None, **fields: object) -> None:
        if maker is not _MAKER:
            raise TypeError("use prepare_block_scaled_weight to make a PreparedWeight")
        vars(self).update(fields)

    def storage_tensors(self) -> tuple[torch.Tensor, ...]:
        """One tensor for each storage, in the order of the fields."""
        unique: dict[int, torch.Tensor] = {}
        for tensor in self._tensors():
            unique.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tuple(unique.values())

    def _tensors(self) -> list[torch.Tensor]:
        fields = (
            self.fprop_data,
            self.fprop_scale,
            self.dgrad_data,
            self.dgrad_scale,
            self.global_scale,
            self.global_scale_inv,
        )
        return [tensor for tensor in fields if tensor is not None]

    def for_calls(self) -> distmoe.torch.PreparedWeight:
        """Of the tensors as they are now."""
        experts = self.fprop_data.shape[0]
        codes = self.fprop_data.view(torch.uint8)
        scales = self.fprop_scale.view(torch.uint8)
        scales = scales.view(experts, -1, scales.shape[1])
        if self.dgrad_data is not None:  # the scale of a tile stands in each of its 32 rows
            scales = scales[:, ::32].contiguous()
        inverse = self.global_scale_inv
        return distmoe.torch.PreparedWeight(
            self.source,
            self.format.precision,
            codes,
            scales,
            None if inverse is None else inverse.view(experts, 1),
            # NVFP4 is for inference alone, whatever was asked for.
            inference=self.dgrad_data is None,
        )


def prepare_block_scaled_weight(
    weight: torch.Tensor,
    config: BlockScaledConfig,
    *,
    inference: bool = False,
    out: PreparedWeight | None = None,
) -> PreparedWeight:
    """Quantises `weight` [G, N, K] once, for many calls; with `out`, into its memory."""
    if not isinstance(config, BlockScaledConfig):
        raise TypeError(f"config must be a BlockScaledConfig, got {type(config).__name__}")
    _check_weight(weight, config.format, inference)
    if out is not None:
        _check_out(out, weight, config.format, inference)
    with torch.no_grad():
        fields = _quantise(weight.detach(), config.format, inference)
    made = PreparedWeight(_MAKER, source=weight, format=config.format, **fields)
    return made if out is None else _moved_into(out, made)


def _check_weight(weight: torch.Tensor, format: BlockScaledFormat, inference: bool) -> None:
    if weight.ndim != 3:
        raise ValueError(f"weight must be [G, N, K], got shape {list(weight.shape)}")
    _, rows, columns = weight.shape
    block = format.vector_size
    has_tiles = format is BlockScaledFormat.MXFP8_E4M3 and not inference
    if columns % block != 0 or (has_tiles and rows % block != 0):
        raise ValueError(f"weight's N and K must be multiples of {block}, got {rows} and {columns}")
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"weight must be torch.bfloat16, got {weight.dtype}")


def _check_out(
    out: PreparedWeight, weight: torch.Tensor, format: BlockScaledFormat, inference: bool
) -> None:
    if not isinstance(out, PreparedWeight):
        raise TypeError(f"out must be a PreparedWeight, got {type(out).__name__}")
    if inference or format is BlockScaledFormat.NVFP4:
        raise ValueError("out is for mxfp8_e4m3 weights of training")
    if out.format is not format or out.dgrad_data is None:
        use = "inference" if out.dgrad_data is None else "training"
        raise ValueError(f"out is {out.format} for {use}; {format} for training is asked for")
    if (out.source.shape, out.source.dtype) != (weight.shape, weight.dtype):
        raise ValueError(
            f"out was made of {out.source.dtype} {list(out.source.shape)}, weight is"
            f" {weight.dtype} {list(weight.shape)}"
        )


def _quantise(weight: torch.Tensor, format: BlockScaledFormat, inference: bool) -> dict:
    is_nvfp4 = format is BlockScaledFormat.NVFP4
    made = distmoe.torch.prepare_block_scaled_weight(
        weight, format.precision, inference=inference or is_nvfp4
    )
    fields = dict.fromkeys(("dgrad_data", "dgrad_scale", "global_scale", "global_scale_inv"))
    if is_nvfp4:
        largest = weight.abs().amax(dim=(1, 2)).float()
        factor = torch.full_like(largest, 2688) / largest.clamp(min=1e-12)
        return fields | dict(
            fprop_data=made.codes,
            fprop_scale=made.scales.view(torch.float8_e4m3fn).flatten(0, 1),
            global_scale=torch.where(largest.isfinite(), factor, 1.0),
            global_scale_inv=made.global_scales.flatten(),
        )
    codes, scales = made.codes.view(torch.float8_e4m3fn), made.scales
    if inference:
        scales = scales.view(torch.float8_e8m0fnu).flatten(0, 1)
        return fields | dict(fprop_data=codes, fprop_scale=scales)
    return fields | dict(
        fprop_data=codes,
        fprop_scale=_scales_of_rows(scales),
        dgrad_data=codes,
        dgrad_scale=_scales_of_rows(scales.mT),
    )


def _scales_of_rows(tiles: torch.Tensor) -> torch.Tensor:
    """[G, rows / 32, columns / 32], of tiles, as [G * rows, columns / 32]."""
    return tiles.repeat_interleave(32, dim=1).flatten(0, 1).view(torch.float8_e8m0fnu)


def _moved_into(out: PreparedWeight, made: PreparedWeight) -> PreparedWeight:
    """`made` in the memory of `out`, whose storages may have been emptied meanwhile."""
    for place, tensor in zip(out._tensors(), made._tensors(), strict=True):
        storage, needed = place.untyped_storage(), tensor.untyped_storage().nbytes()
        if storage.nbytes() < needed:
            storage.resize_(needed)
        place.view(torch.uint8).copy_(tensor.view(torch.uint8))
    fields = {**vars(out), "source": made.source}
    return PreparedWeight(_MAKER, **fields)
