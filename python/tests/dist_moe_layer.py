# SPDX-License-Identifier: Apache-2.0
"""A layer of dist_moe's for its tests."""

import torch

from distmoe import dist_moe
from layer import same_bits

T, D, F, K, E = 6, 256, 64, 2, 5


def config(**changes) -> dist_moe.Config:
    values = dict(
        max_num_local_input_tokens=T,
        hidden_dim=D,
        intermediate_dim=F,
        top_k=K,
        num_experts=E,
        max_moe_layers_per_activation_slot=2,
    )
    return dist_moe.Config(**{**values, **changes})


def context_of(device="cpu", **changes) -> dist_moe.Context:
    return dist_moe.create_context(group=None, config=config(**changes), device=device)


class Layer:
    """Inputs with all values distinct, one route disabled under a score of NaN."""

    def __init__(self, *, trains=True, dtype=torch.float32, device="cpu"):
        generator = torch.Generator().manual_seed(5)

        def random(*shape, scale=1.0):
            return (torch.randn(*shape, generator=generator) * scale).bfloat16().to(device)

        self.x = random(T, D).requires_grad_(trains)
        self.w13 = random(E, 2 * F, D, scale=0.1).requires_grad_(trains)
        self.w2 = random(E, D, F, scale=0.1).requires_grad_(trains)
        self.ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
        self.ids[1, 1] = -1
        self.ids = self.ids.to(device)
        self.scores = (torch.rand(T, K, generator=generator) + 0.2).to(device, dtype)
        self.scores[1, 1] = float("nan")
        self.scores.requires_grad_(trains)
        self.dy = random(T, D)

    def forward(self, context, options=None):
        arguments = (self.x, self.ids, self.scores, self.w13, self.w2, context)
        return dist_moe.routed_experts(*arguments, options=options)

    def train(self, context, options=None):
        """y and the gradients, which are taken off the leaves."""
        y = self.forward(context, options)
        y.backward(self.dy)
        results = dict(y=y.detach())
        for name in ("x", "scores", "w13", "w2"):
            leaf = getattr(self, name)
            results[name], leaf.grad = leaf.grad, None
        return results


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value is not None and same_bits(value, right[name]), name


def norm_options(**changes):
    values = dict(eps=1e-5, norm_output_dtype=torch.float32, output_dtype=torch.bfloat16)
    norm = dist_moe.RMSNormPostprocess(**{**values, **changes})
    return dist_moe.ExecutionOptions(experts_output_postprocess=norm)
