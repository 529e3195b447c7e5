# SPDX-License-Identifier: Apache-2.0
"""PyTorch operators of distmoe, with gradients.

The same bits whether they run eagerly, traced, compiled or under activation checkpointing.
"""

from distmoe.torch.checkpointing import checkpoint_context
from distmoe.torch.context import Context, create_context
from distmoe.torch.experts import RoutedExperts
from distmoe.torch.group import GroupCommunicator
from distmoe.torch.preparation import prepare_block_scaled_weight, refill_prepared_weight
from distmoe.torch.routed_experts import routed_experts
from distmoe.torch.weights import PreparedWeight

__all__ = [
    "Context",
    "GroupCommunicator",
    "PreparedWeight",
    "RoutedExperts",
    "checkpoint_context",
    "create_context",
    "prepare_block_scaled_weight",
    "refill_prepared_weight",
    "routed_experts",
]
