# SPDX-License-Identifier: Apache-2.0
"""Weights of a module as codes and scales, for calls that need no gradient.

Prepared once and kept while the module and its weights stay as they are.
"""

from __future__ import annotations

import weakref

import torch

import distmoe

# What was prepared for a module, with what it was made of.
_PREPARED: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def prepared_weights(
    module: torch.nn.Module,
    precision: str,
    gate_up_layout: str,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> tuple[distmoe.PreparedWeight, distmoe.PreparedWeight]:
    """`w13` and `w2` of `module` for inference contexts of `precision`."""
    sources = (module.gate_up_proj, module.down_proj)
    made_of = (precision, *((source.data_ptr(), source._version) for source in sources))
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
