# SPDX-License-Identifier: Apache-2.0
"""The configuration of dist_moe, its checks in its order, and the distmoe.Config that it means."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

import distmoe
from distmoe.dist_moe.block_scaled import BlockScaledConfig, BlockScaledFormat

logger = logging.getLogger("distmoe.dist_moe")

Bf16GroupedGemmPreset = Literal[
    "1cta1mma_bm64_bn128",
    "1cta1mma_bm64_bn256",
    "1cta1mma_bm128_bn128",
    "1cta1mma_bm128_bn256",
    "1cta2mma_bm256_bn256",
    "2cta1mma_bm256_bn256",
    "2cta2mma_bm512_bn256",
]

_REQUIRED: Any = None
_WGRAD_DTYPES = {None: None, torch.bfloat16: "bf16", torch.float32: "fp32"}


def _check_positive_factor(name: str, value: float) -> None:
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be finite and positive, got {value}")


@dataclass(frozen=True)
class VmmConfig:
    """Scratch beyond the device factor in host memory."""

    total_scratch_capacity_factor: float = 16.0
    prefetch: bool = True

    def __post_init__(self) -> None:
        _check_positive_factor("total_scratch_capacity_factor", self.total_scratch_capacity_factor)
        if not isinstance(self.prefetch, bool):
            raise TypeError(f"prefetch must be a bool, got {self.prefetch!r}")


@dataclass(frozen=True)
class Config:
    """The same on every rank. One of `num_local_input_tokens`, the tokens of every call, and
    `max_num_local_input_tokens`, the most that a call has, must be given."""

    num_local_input_tokens: int | None = None
    hidden_dim: int = _REQUIRED
    intermediate_dim: int = _REQUIRED
    top_k: int = _REQUIRED
    num_experts: int = _REQUIRED
    max_moe_layers_per_activation_slot: int = _REQUIRED
    device_scratch_capacity_factor: float = 1.0
    activation_slot_bytes: int | None = None
    activation_slot_capacity_factor: float | None = None
    num_activation_slots: int = 1
    vmm: VmmConfig | None = None
    num_sms: int | None = None
    bf16_grouped_gemm_preset: Bf16GroupedGemmPreset | None = None
    block_scaled: BlockScaledConfig | None = None
    activation: Literal["swiglu", "swiglu_clamped"] = "swiglu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    wgrad_dtype: torch.dtype | None = None
    inference: bool = False
    max_num_local_input_tokens: int | None = None

    @property
    def most_tokens(self) -> int:
        exact = self.num_local_input_tokens
        return self.max_num_local_input_tokens if exact is None else exact

    def __post_init__(self) -> None:
        self._check_required()
        self._check_sizes()
        self._check_slots()
        self._check_execution()
        if self.block_scaled is not None:
            self._check_block_scaled(self.block_scaled.format)

    def _check_required(self) -> None:
        if self.num_local_input_tokens is not None and self.max_num_local_input_tokens is not None:
            raise ValueError("num_local_input_tokens and max_num_local_input_tokens: give one")
        required = (
            "hidden_dim",
            "intermediate_dim",
            "top_k",
            "num_experts",
            "max_moe_layers_per_activation_slot",
        )
        missing = [name for name in required if getattr(self, name) is None]
        if self.most_tokens is None:
            missing.insert(0, "num_local_input_tokens")
        if missing:
            raise TypeError(f"Config needs {', '.join(missing)}")

    def _check_sizes(self) -> None:
        sizes = dict(
            num_local_input_tokens=self.most_tokens,
            hidden_dim=self.hidden_dim,
            intermediate_dim=self.intermediate_dim,
            top_k=self.top_k,
        )
        for name, value in sizes.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.hidden_dim % 64 != 0:
            raise ValueError(f"hidden_dim must be a multiple of 64, got {self.hidden_dim}")
        if self.num_experts <= 0:
            raise ValueError(f"num_experts must be positive, got {self.num_experts}")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k must be at most num_experts={self.num_experts}, got {self.top_k}"
            )
        if self.max_moe_layers_per_activation_slot <= 0:
            raise ValueError(
                "max_moe_layers_per_activation_slot must be positive, got"
                f" {self.max_moe_layers_per_activation_slot}"
            )

    def _check_slots(self) -> None:
        exact, factor = self.activation_slot_bytes, self.activation_slot_capacity_factor
        if exact is not None:
            if isinstance(exact, bool) or not isinstance(exact, int):
                raise TypeError(f"activation_slot_bytes must be an int, got {exact!r}")
            if exact < 0:
                raise ValueError(f"activation_slot_bytes must not be negative, got {exact}")
        if factor is not None:
            if isinstance(factor, bool) or not isinstance(factor, (int, float)):
                raise TypeError(f"activation_slot_capacity_factor must be a number, got {factor!r}")
            if not math.isfinite(factor) or factor < 0:
                raise ValueError(
                    f"activation_slot_capacity_factor must be finite and not negative, got {factor}"
                )
        if exact is not None and factor is not None:
            raise ValueError(
                "activation_slot_bytes and activation_slot_capacity_factor are mutually exclusive"
            )
        least = 0 if self.inference else 1
        if self.num_activation_slots < least:
            raise ValueError(
                f"num_activation_slots must be at least {least}, got {self.num_activation_slots}"
            )
        if self.inference and (exact is not None or factor is not None):
            raise ValueError("an inference context does not retain saved activations: no slot size")

    def _check_execution(self) -> None:
        _check_positive_factor(
            "device_scratch_capacity_factor", self.device_scratch_capacity_factor
        )
        if self.num_sms is not None and self.num_sms <= 0:
            raise ValueError(f"num_sms must be positive, got {self.num_sms}")
        presets = get_args(Bf16GroupedGemmPreset)
        if self.bf16_grouped_gemm_preset not in (None, *presets):
            raise ValueError(
                f"{self.bf16_grouped_gemm_preset!r} is no supported BF16 preset; those are"
                f" {', '.join(presets)}"
            )
        if self.wgrad_dtype not in _WGRAD_DTYPES:
            raise TypeError(f"wgrad_dtype must be bfloat16 or float32, got {self.wgrad_dtype!r}")
        if self.activation not in ("swiglu", "swiglu_clamped"):
            raise ValueError(
                f"activation must be swiglu or swiglu_clamped, got {self.activation!r}"
            )
        if self.activation == "swiglu_clamped":
            for name in ("swiglu_alpha", "swiglu_limit"):
                value = getattr(self, name)
                if not math.isfinite(value) or value <= 0:
                    raise ValueError(f"{name} must be a finite positive number, got {value}")

    def _check_block_scaled(self, block_format: BlockScaledFormat) -> None:
        width, depth, vector = self.hidden_dim, self.intermediate_dim, block_format.vector_size
        if width % vector != 0 or depth % vector != 0:
            raise ValueError(
                f"{block_format} needs hidden_dim and intermediate_dim that are multiples of"
                f" {vector}, got {width} and {depth}"
            )
        if block_format is not BlockScaledFormat.NVFP4:
            return
        if not self.inference:
            raise ValueError("nvfp4 is inference-only")
        if width % 256 != 0 or depth % 256 != 0 or width > 16384 or depth > 8192:
            raise ValueError(
                "nvfp4 needs hidden_dim (at most 16384) and intermediate_dim (at most 8192) that"
                f" are a multiple of 256, got {width} and {depth}"
            )


def core_config(config: Config) -> distmoe.Config:
    """What `config` means to distmoe; what has no meaning here is left out."""
    scaled, vmm = config.block_scaled, config.vmm
    return distmoe.Config(
        max_tokens=config.most_tokens,
        hidden_dim=config.hidden_dim,
        intermediate_dim=config.intermediate_dim,
        top_k=config.top_k,
        num_experts=config.num_experts,
        max_moe_layers_per_activation_slot=config.max_moe_layers_per_activation_slot,
        device_scratch_capacity_factor=config.device_scratch_capacity_factor,
        activation_slot_bytes=config.activation_slot_bytes,
        activation_slot_capacity_factor=config.activation_slot_capacity_factor,
        num_activation_slots=config.num_activation_slots,
        host_scratch=None
        if vmm is None
        else distmoe.HostScratch(
            total_scratch_capacity_factor=vmm.total_scratch_capacity_factor, prefetch=vmm.prefetch
        ),
        precision="bf16" if scaled is None else scaled.format.precision,
        pipeline="staged" if scaled is None else scaled.pipeline,
        activation=config.activation,
        # A plain swiglu has neither, and distmoe checks both.
        **(
            dict(swiglu_alpha=config.swiglu_alpha, swiglu_limit=config.swiglu_limit)
            if config.activation == "swiglu_clamped"
            else {}
        ),
        wgrad_dtype=_WGRAD_DTYPES[config.wgrad_dtype],
        inference=config.inference,
        num_sms=config.num_sms,
    )


def ignored_tuning(config: Config) -> list[str]:
    """The fields that are set and tune kernels which distmoe has not."""
    names = []
    if config.bf16_grouped_gemm_preset is not None:
        names.append("bf16_grouped_gemm_preset")
    if config.block_scaled is not None and config.block_scaled.fast_math:
        names.append("block_scaled.fast_math")
    if config.block_scaled is not None and config.block_scaled.kernel_config is not None:
        names.append("block_scaled.kernel_config")
    return names
