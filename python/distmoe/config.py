# SPDX-License-Identifier: Apache-2.0
"""Everything that fixes the memory and the arithmetic of a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distmoe import _core


@dataclass(frozen=True, kw_only=True)
class HostScratch:
    """Scratch beyond the device factor that lives in host memory."""

    total_scratch_capacity_factor: float = 16.0
    prefetch: bool = True


@dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a context, the same on every rank; validated when it is made.

    The fields are those of the C++ `Config`; docs/dimensions.md has the letters. `timeout` bounds
    every wait for a peer, in seconds.
    """

    max_tokens: int
    hidden_dim: int
    intermediate_dim: int
    top_k: int
    num_experts: int
    max_moe_layers_per_activation_slot: int

    device_scratch_capacity_factor: float = 2.0
    activation_slot_bytes: int | None = None
    activation_slot_capacity_factor: float | None = None
    num_activation_slots: int = 1
    activation_policy: Literal["full", "lean"] = "full"
    distinct_experts: bool = True
    host_scratch: HostScratch | None = None
    precision: Literal["bf16", "mxfp8", "nvfp4", "mxfp4"] = "bf16"
    pipeline: Literal["staged", "mega"] = "staged"
    combine: Literal["per_route", "per_rank"] = "per_route"
    activation: Literal["swiglu", "swiglu_clamped"] = "swiglu"
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    wgrad_dtype: Literal["bf16", "fp32"] | None = None
    inference: bool = False
    num_sms: int | None = None
    gate_up_layout: Literal["concatenated", "interleaved"] = "concatenated"
    kernel_choice: Literal["tuned", "fixed"] = "tuned"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        validate(self)


def validate(config: Config) -> None:
    """Raises for the first rule that `config` breaks, with the value and the legal range."""
    _core.validate(config)
