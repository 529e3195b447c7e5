# SPDX-License-Identifier: Apache-2.0
"""Block-scaled formats and what is configured of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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

    @property
    def precision(self) -> str:
        """Its name in distmoe."""
        return "mxfp8" if self is BlockScaledFormat.MXFP8_E4M3 else "nvfp4"


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
