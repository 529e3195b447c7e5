# SPDX-License-Identifier: Apache-2.0
"""Two MoE layers with residuals, whose ways of running are compared bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import distmoe
import distmoe.torch
from layer import BF16, Layer, make_config, same_bits

NUM_LAYERS = 2
FP32_GRADIENTS = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"),
    reason=f"PyTorch {torch.__version__} keeps no FP32 gradient of a BF16 tensor",
)


def train_config(**changes) -> distmoe.Config:
    values = dict(
        max_moe_layers_per_activation_slot=NUM_LAYERS, activation_slot_capacity_factor=1.0
    )
    values.update(changes)
    return make_config(**values)


@contextlib.contextmanager
def open_context(config: distmoe.Config | None = None, device: torch.device | str = "cpu"):
    with distmoe.torch.create_context(config or train_config(), device=device) as context:
        yield context


class Model:
    """Leaves of two layers of one routing, and the function that a caller would write."""

    def __init__(self, context, *, num_tokens: int = 11, has_bias: bool = True) -> None:
        self.context = context
        layers = [
            Layer(
                context.config,
                num_tokens=num_tokens,
                seed=seed,
                has_bias=has_bias,
                device=context.device,
            )
            for seed in range(NUM_LAYERS)
        ]
        self.ids, self.coefficients = layers[0].ids, layers[0].dy
        self.leaves: dict[str, Tensor] = dict(x=layers[0].x, scores=layers[0].scores)
        for index, layer in enumerate(layers):
            for name, weight in layer.local(context).items():
                self.leaves[f"{name}.{index}"] = (weight + index / 64).to(BF16)
        for leaf in self.leaves.values():
            leaf.requires_grad_()

    def block(self, h: Tensor, scores: Tensor, index: int, leaves: dict[str, Tensor]) -> Tensor:
        y = distmoe.torch.routed_experts(
            h,
            leaves.get("ids", self.ids),
            scores,
            leaves[f"w13.{index}"],
            leaves[f"w2.{index}"],
            self.context,
            bias13=leaves.get(f"bias13.{index}"),
            bias2=leaves.get(f"bias2.{index}"),
        )
        return h + y

    def forward(self, leaves: dict[str, Tensor]) -> Tensor:
        h = leaves["x"]
        for index in range(NUM_LAYERS):
            h = self.block(h, leaves["scores"], index, leaves)
        return h

    def train(self, forward: Callable[[dict[str, Tensor]], Tensor] | None = None) -> dict:
        """The output and the gradient of every leaf."""
        for leaf in self.leaves.values():
            leaf.grad = None
        y = (forward or self.forward)(self.leaves)
        y.backward(self.coefficients)
        results = {name: leaf.grad.clone() for name, leaf in self.leaves.items()}
        return dict(y=y.detach().clone(), **results)


def expect_same_bits(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert results.keys() == expected.keys()
    different = [name for name in expected if not same_bits(results[name], expected[name])]
    assert different == []
