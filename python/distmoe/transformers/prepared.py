# SPDX-License-Identifier: Apache-2.0
"""Weights of a module as codes and scales, for calls that need no gradient.

Prepared once and kept while the module and its weights stay as they are, as far as PyTorch tells:
writes through `.data`, and into weights made under inference_mode, are not seen.
"""

from __future__ import annotations

import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import distmoe

# What was prepared for a module, with what it was made of.
_PREPARED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class _OptimizerSteps:
    """Steps of all optimizers. A fused one changes weights without counting their version up."""

    count = 0

    @classmethod
    def note(cls, *_: object) -> None:
        cls.count += 1


register_optimizer_step_post_hook(_OptimizerSteps.note)


def _state_of(weight: torch.Tensor) -> tuple[int, int]:
    # What is made in inference mode has no version.
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def prepared_weights(
    module: torch.nn.Module,
    precision: str,
    gate_up_layout: str,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> tuple[distmoe.PreparedWeight, distmoe.PreparedWeight]:
    """`w13` and `w2` of `module` for inference contexts of `precision`."""
    sources = (module.gate_up_proj, module.down_proj)
    made_of = (precision, _OptimizerSteps.count, *map(_state_of, sources))
    known, pair = _PREPARED.get(module, (None, None))
    if known != made_of:
        pair = (
            distmoe.prepare_block_scaled_weight(
                w13.detach(), precision, inference=True, gate_up_layout=gate_up_layout
            ),
            distmoe.prepare_block_scaled_weight(w2.detach(), precision, inference=True),
        )
        _PREPARED[module] = (made_of, pair)
    return pair
