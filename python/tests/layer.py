# SPDX-License-Identifier: Apache-2.0
"""A small layer with distinct values everywhere, and what a plain loop makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import distmoe
from distmoe.torch.eager import stream_of

BF16 = torch.bfloat16


def make_config(**changes) -> distmoe.Config:
    values = dict(
        max_tokens=16,
        hidden_dim=32,
        intermediate_dim=24,
        top_k=3,
        num_experts=7,
        max_moe_layers_per_activation_slot=2,
        timeout=20.0,
    )
    values.update(changes)
    return distmoe.Config(**values)


@dataclass
class Layer:
    """Inputs of one rank and the weights of all experts."""

    config: distmoe.Config
    num_tokens: int = 11
    seed: int = 0
    has_bias: bool = False
    device: torch.device | str = "cpu"
    x: torch.Tensor = field(init=False)
    ids: torch.Tensor = field(init=False)
    scores: torch.Tensor = field(init=False)
    w13: torch.Tensor = field(init=False)
    w2: torch.Tensor = field(init=False)
    bias13: torch.Tensor | None = field(init=False, default=None)
    bias2: torch.Tensor | None = field(init=False, default=None)
    dy: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        config, tokens = self.config, self.num_tokens
        weights = torch.Generator().manual_seed(1000)  # the same on every rank
        inputs = torch.Generator().manual_seed(self.seed)
        width, depth, experts = config.hidden_dim, config.intermediate_dim, config.num_experts

        def random(generator, *shape, scale=1.0):
            return torch.randn(*shape, generator=generator) * scale

        self.w13 = random(weights, experts, 2 * depth, width, scale=0.3).to(BF16)
        self.w2 = random(weights, experts, width, depth, scale=0.3).to(BF16)
        if self.has_bias:
            self.bias13 = random(weights, experts, 2 * depth).to(BF16)
            self.bias2 = random(weights, experts, width).to(BF16)
        self.x = random(inputs, tokens, width).to(BF16)
        self.dy = random(inputs, tokens, width).to(BF16)
        chosen = [torch.randperm(experts, generator=inputs)[: config.top_k] for _ in range(tokens)]
        self.ids = (
            torch.stack(chosen) if tokens else torch.zeros(0, config.top_k, dtype=torch.int64)
        )
        if tokens > 2:
            self.ids[2, 1] = -1
        self.scores = torch.rand(tokens, config.top_k, generator=inputs) + 0.1
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(self.device))

    def local(self, context) -> dict[str, torch.Tensor]:
        """The weights of this rank's experts, as arguments of a call."""
        own = slice(context.first_expert, context.first_expert + context.num_local_experts)
        weights = dict(w13=self.w13[own], w2=self.w2[own])
        if self.has_bias:
            weights.update(bias13=self.bias13[own], bias2=self.bias2[own])
        return weights

    def inputs(self) -> dict[str, torch.Tensor]:
        return dict(x=self.x, topk_ids=self.ids, topk_scores=self.scores)


def reference(layer: Layer) -> torch.Tensor:
    """The layer in double precision; differentiable where its tensors are."""
    depth = layer.config.intermediate_dim
    rows = []
    for token in range(layer.num_tokens):
        row = torch.zeros(layer.config.hidden_dim, dtype=torch.float64)
        for k in range(layer.config.top_k):
            expert = int(layer.ids[token, k])
            if expert < 0:
                continue
            h1 = layer.w13[expert].double() @ layer.x[token].double()
            if layer.has_bias:
                h1 = h1 + layer.bias13[expert].double()
            h2 = torch.nn.functional.silu(h1[:depth]) * h1[depth:]
            h3 = layer.w2[expert].double() @ h2
            if layer.has_bias:
                h3 = h3 + layer.bias2[expert].double()
            row = row + h3 * layer.scores[token, k].double()
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, layer.config.hidden_dim)


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    value, exact = value.detach().double(), exact.detach().double()
    return float((value - exact).norm() / exact.norm())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, so that NaN and the sign of zero compare."""
    return tensor.detach().contiguous().view(torch.uint8)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def nan_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, float("nan"))


def run_forward(context, layer: Layer) -> torch.Tensor:
    y = nan_like(layer.x)
    given = dict(**layer.inputs(), **layer.local(context))
    distmoe.routed_experts(context, **given, y=y, stream=stream_of(y))
    return y


GRADIENTS = ("x", "scores", "w13", "w2", "bias13", "bias2")


def run_training(context, layer: Layer) -> dict[str, torch.Tensor]:
    """Forward and backward: y and the gradients of everything that has one."""
    y = nan_like(layer.x)
    weights, stream = layer.local(context), stream_of(y)
    saved = distmoe.saving_routed_experts(context, **layer.inputs(), **weights, y=y, stream=stream)
    results = dict(x=nan_like(layer.x), scores=nan_like(layer.scores))
    is_wide = layer.config.wgrad_dtype == "fp32"
    for name, weight in weights.items():
        results[name] = nan_like(weight.float() if is_wide else weight)
    distmoe.routed_experts_backward(
        context,
        saved,
        layer.dy,
        **weights,
        **{f"grad_{name}": place for name, place in results.items()},
        stream=stream,
    )
    return dict(y=y, **results)


def digest(results: dict[str, torch.Tensor]) -> dict[str, int]:
    """A number of the bits of every tensor: what moves or changes changes it."""
    numbers = {}
    for name, tensor in results.items():
        values = bits(tensor).flatten().cpu().long()
        numbers[name] = int((values * (torch.arange(values.numel()) % 8191 + 1)).sum())
    return numbers
