# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing that leaves the experts to their slots."""

from __future__ import annotations

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from distmoe.torch import operators


def _policy(_, operator, *args, **kwargs) -> CheckpointPolicy:
    if operator is operators.saving_routed_experts_op:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_context():
    """A `context_fn` of torch.utils.checkpoint: all is computed again but distmoe's forwards.

    Their slots decide by themselves what they keep and what they compute again.

    So backward makes no second exchange between ranks. torch.compile needs it for regions that call
    distmoe: operators that meet other ranks cannot be run again by a compiled graph.
    """
    return create_selective_checkpoint_contexts(_policy)
