# SPDX-License-Identifier: Apache-2.0
"""PyTorch operators of distmoe, with gradients.

The same bits whether they run eagerly, traced, compiled or under activation checkpointing.
"""

from distmoe.torch.checkpointing import checkpoint_context
from distmoe.torch.context import Context, create_context
from distmoe.torch.experts import RoutedExperts
from distmoe.torch.group import GroupCommunicator
from distmoe.torch.routed_experts import routed_experts

__all__ = [
    "Context",
    "GroupCommunicator",
    "RoutedExperts",
    "checkpoint_context",
    "create_context",
    "routed_experts",
]
