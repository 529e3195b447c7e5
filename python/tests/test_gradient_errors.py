# SPDX-License-Identifier: Apache-2.0
"""y and every gradient are at most 1.1 times as far from FP64 as those of a PyTorch layer in BF16.

PyTorch's products add up BF16 operands in FP32, as distmoe's do; after every operation it rounds to
BF16. bench/torch_gradients.py measures more and larger layers.
"""

import pytest
import torch

import distmoe
from layer import GRADIENTS, Layer, make_config, relative_error, run_training

SHAPES = [
    dict(max_tokens=90, hidden_dim=96, intermediate_dim=80, top_k=3, num_experts=7),
    dict(max_tokens=41, hidden_dim=210, intermediate_dim=33, top_k=2, num_experts=4),
    dict(max_tokens=64, hidden_dim=64, intermediate_dim=256, top_k=4, num_experts=9),
]


def differentiable(layer: Layer, dtype: torch.dtype | None) -> Layer:
    """A copy whose tensors are leaves, of `dtype` or of their own."""
    copy = Layer(layer.config, layer.num_tokens, layer.seed, layer.has_bias)
    for name in GRADIENTS:
        tensor = getattr(copy, name)
        if tensor is not None:
            setattr(copy, name, tensor.to(dtype or tensor.dtype).requires_grad_())
    return copy


def torch_layer(layer: Layer) -> torch.Tensor:
    """y in the type of x and the weights, expert by expert."""
    y = torch.zeros_like(layer.x)
    for expert in range(layer.config.num_experts):
        token, k = torch.where(layer.ids == expert)
        biases = (layer.bias13[expert], layer.bias2[expert]) if layer.has_bias else (None, None)
        h1 = torch.nn.functional.linear(layer.x[token], layer.w13[expert], biases[0])
        gate, up = h1.chunk(2, dim=1)
        h2 = torch.nn.functional.silu(gate) * up
        h3 = torch.nn.functional.linear(h2, layer.w2[expert], biases[1])
        y = y.index_add(0, token, h3 * layer.scores[token, k, None].to(y.dtype))
    return y


def torch_results(layer: Layer) -> dict[str, torch.Tensor]:
    y = torch_layer(layer)
    y.backward(layer.dy.to(y.dtype))
    leaves = {name: getattr(layer, name) for name in GRADIENTS}
    return dict(y=y, **{name: leaf.grad for name, leaf in leaves.items() if leaf is not None})


@pytest.mark.parametrize("policy", ["full", "lean"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"D{shape['hidden_dim']}")
def test_errors_are_those_of_a_pytorch_bf16_layer(shape, has_bias, policy):
    config = make_config(activation_policy=policy, **shape)
    layer = Layer(config, num_tokens=config.max_tokens, seed=5, has_bias=has_bias)
    with distmoe.Context.create(config) as context:
        results = run_training(context, layer)
    exact = torch_results(differentiable(layer, torch.float64))
    peer = torch_results(differentiable(layer, None))
    assert set(results) == set(exact) == set(peer)
    for name, value in exact.items():
        error = relative_error(results[name], value)
        assert 0 < error <= 1.1 * relative_error(peer[name], value), name
