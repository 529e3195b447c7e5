# SPDX-License-Identifier: Apache-2.0
"""The public names of dist_moe, computed by distmoe.

A program that was written against dist_moe changes its import and runs on Hopper GPUs or on a CPU.
docs/python.md says what differs.
"""

from distmoe.dist_moe.api import (
    Bf16GroupedGemmPreset,
    BlockScaledConfig,
    BlockScaledFormat,
    BlockScaledKernelConfig,
    Config,
    Context,
    ExecutionOptions,
    MemoryPlan,
    PreparedWeight,
    RMSNormPostprocess,
    VmmConfig,
    create_context,
    plan_memory,
    prepare_block_scaled_weight,
    routed_experts,
    supports_fused_post_expert_rmsnorm,
)

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
