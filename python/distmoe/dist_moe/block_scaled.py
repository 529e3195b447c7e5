# SPDX-License-Identifier: Apache-2.0
"""Block-scaled formats: what is configured, and weights that were quantised ahead of calls."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from distmoe.errors import UnsupportedError


class BlockScaledFormat(str, enum.Enum):
    """A str like enum.StrEnum, which Python 3.10 has not."""

    MXFP8_E4M3 = "mxfp8_e4m3"
    NVFP4 = "nvfp4"

    def __str__(self) -> str:
        return self.value

    @property
    def vector_size(self) -> int:
        """Elements that share a scale."""
        return 32 if self is BlockScaledFormat.MXFP8_E4M3 else 16


@dataclass(frozen=True)
class BlockScaledKernelConfig:
    """Tuning of Blackwell kernels: checked, and without effect here."""

    num_ctas: int
    block_m: int
    block_n: int
    block_k: int
    num_smem_buffers: int
    num_c_stages: int
    num_tmem_buffers: int
    num_tile_buffers: int
    epilogue_subtile: int
    overlapping_accum: bool
    swap_ab: bool
    kloop_unroll: int
    num_warps: int = 8
    static_scheduler: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, bool) and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.num_ctas not in (1, 2):
            raise ValueError(f"num_ctas must be 1 or 2, got {self.num_ctas}")
        if self.block_n % self.epilogue_subtile != 0:
            raise ValueError(
                f"block_n must be a multiple of epilogue_subtile, got {self.block_n} and"
                f" {self.epilogue_subtile}"
            )


@dataclass(frozen=True)
class BlockScaledConfig:
    """Which format; fast_math and kernel_config are checked, and without effect here."""

    format: BlockScaledFormat = BlockScaledFormat.MXFP8_E4M3
    fast_math: bool = False
    pipeline: str = "staged"
    kernel_config: BlockScaledKernelConfig | None = None

    def __post_init__(self) -> None:
        if self.format not in tuple(BlockScaledFormat):
            legal = ", ".join(member.value for member in BlockScaledFormat)
            raise ValueError(f"format must be one of {legal}, got {self.format!r}")
        object.__setattr__(self, "format", BlockScaledFormat(self.format))
        if self.fast_math and self.format is BlockScaledFormat.NVFP4:
            raise ValueError("fast_math is not for nvfp4")
        if self.pipeline not in ("staged", "mega"):
            raise ValueError(f"pipeline must be staged or mega, got {self.pipeline!r}")
        if self.kernel_config is not None and self.kernel_config.block_k != 128:
            raise ValueError(f"kernel_config.block_k must be 128, got {self.kernel_config.block_k}")


class PreparedWeight:
    """A weight as codes and scales; made by `prepare_block_scaled_weight`."""

    source: torch.Tensor
    format: BlockScaledFormat
    fprop_data: torch.Tensor
    fprop_scale: torch.Tensor
    dgrad_data: torch.Tensor | None
    dgrad_scale: torch.Tensor | None
    global_scale: torch.Tensor | None
    global_scale_inv: torch.Tensor | None

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("use prepare_block_scaled_weight to make a PreparedWeight")

    def storage_tensors(self) -> tuple[torch.Tensor, ...]:
        """One tensor for each storage, in the order of the fields."""
        fields = (
            self.fprop_data,
            self.fprop_scale,
            self.dgrad_data,
            self.dgrad_scale,
            self.global_scale,
            self.global_scale_inv,
        )
        unique: dict[int, torch.Tensor] = {}
        for tensor in fields:
            if tensor is not None:
                unique.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tuple(unique.values())


def prepare_block_scaled_weight(
    weight: torch.Tensor,
    config: BlockScaledConfig,
    *,
    inference: bool = False,
    out: PreparedWeight | None = None,
) -> PreparedWeight:
    """Quantises `weight` [G, N, K] once, for many calls."""
    if not isinstance(config, BlockScaledConfig):
        raise TypeError(f"config must be a BlockScaledConfig, got {type(config).__name__}")
    if out is not None and not isinstance(out, PreparedWeight):
        raise TypeError(f"out must be a PreparedWeight, got {type(out).__name__}")
    is_nvfp4 = config.format is BlockScaledFormat.NVFP4
    if out is not None and (inference or is_nvfp4):
        raise ValueError("out is for mxfp8_e4m3 weights of training")
    if weight.ndim != 3:
        raise ValueError(f"weight must be [G, N, K], got shape {list(weight.shape)}")
    _, rows, columns = weight.shape
    block = config.format.vector_size
    if columns % block != 0 or (not is_nvfp4 and not inference and rows % block != 0):
        raise ValueError(f"weight's N and K must be multiples of {block}, got {rows} and {columns}")
    raise UnsupportedError(
        f"weights prepared as {config.format.value} are not in this version of distmoe.dist_moe;"
        " MXFP8 contexts take BF16 weights, and distmoe.prepare_block_scaled_weight prepares"
        " them for the calls of distmoe"
    )
