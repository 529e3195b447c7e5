# SPDX-License-Identifier: Apache-2.0
"""The sixteen names, in one place as in dist_moe."""

from distmoe.dist_moe.block_scaled import (
    BlockScaledConfig,
    BlockScaledFormat,
    BlockScaledKernelConfig,
)
from distmoe.dist_moe.config import Bf16GroupedGemmPreset, Config, VmmConfig
from distmoe.dist_moe.context import Context, create_context
from distmoe.dist_moe.norm import RMSNormPostprocess, supports_fused_post_expert_rmsnorm
from distmoe.dist_moe.options import ExecutionOptions
from distmoe.dist_moe.plan import MemoryPlan, plan_memory
from distmoe.dist_moe.prepared import PreparedWeight, prepare_block_scaled_weight
from distmoe.dist_moe.routed_experts import routed_experts

__all__ = [
    "Bf16GroupedGemmPreset",
    "BlockScaledConfig",
    "BlockScaledFormat",
    "BlockScaledKernelConfig",
    "Config",
    "Context",
    "ExecutionOptions",
    "MemoryPlan",
    "PreparedWeight",
    "RMSNormPostprocess",
    "VmmConfig",
    "create_context",
    "plan_memory",
    "prepare_block_scaled_weight",
    "routed_experts",
    "supports_fused_post_expert_rmsnorm",
]
