# SPDX-License-Identifier: Apache-2.0
"""A derivative of a gradient raises, where the loss is linear too, and is never zero in silence."""

import pytest
import torch

import dist_moe_layer
import distmoe
import distmoe.torch
from distmoe import dist_moe
from layer import Layer, same_bits
from torch_model import Model, open_context


def linear_loss(model):
    return model.forward(model.leaves).float().sum()


@pytest.mark.parametrize("of", ["x", "scores", "w13.0", "w2.1", "bias2.0"])
@pytest.mark.parametrize("to", ["x", "scores", "w13.0", "w2.1", "bias2.0"])
def test_a_penalty_on_a_gradient_raises(of, to):
    with open_context() as context:
        model = Model(context)
        (gradient,) = torch.autograd.grad(linear_loss(model), model.leaves[of], create_graph=True)
        leaf = model.leaves[to]
        loss = gradient.float().square().sum() + leaf.float().sum()  # has a derivative beside it
        with pytest.raises(distmoe.UnsupportedError, match="no double backward"):
            torch.autograd.grad(loss, leaf)


def test_a_recorded_gradient_has_the_bits_of_another(device):
    with open_context(device=device) as context:
        model = Model(context)
        leaves = list(model.leaves.values())
        plain = torch.autograd.grad(linear_loss(model), leaves)
        recorded = torch.autograd.grad(linear_loss(model), leaves, create_graph=True)
        assert all(map(same_bits, recorded, plain))
        assert all(gradient.requires_grad for gradient in recorded)


def test_frozen_weights_are_no_way_around_it():
    with open_context() as context:
        layer = Layer(context.config)
        x = layer.x.requires_grad_()
        y = distmoe.torch.routed_experts(
            x, layer.ids, layer.scores, **layer.local(context), context=context
        )
        (gradient,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        with pytest.raises(distmoe.UnsupportedError, match="no double backward"):
            (gradient.float().square().sum() + x.float().sum()).backward()


def test_a_recorded_gradient_keeps_no_graph_alive(device):
    with open_context(device=device) as context:
        layer = Layer(context.config, device=context.device)
        x = layer.x.requires_grad_()
        for _ in range(3):  # a graph that stayed would leave its slot in need of a reset
            y = distmoe.torch.routed_experts(
                x, layer.ids, layer.scores, **layer.local(context), context=context
            )
            torch.autograd.grad(y.float().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    "options",
    [
        dict(weights_preprocess_fn=lambda weight: weight),
        dict(experts_output_postprocess=lambda rows: rows.float().square()),
        dict(inplace_wgrad_accum=True),
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("of", ["x", "scores", "w13"])
def test_dist_moe_raises_too(options, of):
    layer, options = dist_moe_layer.Layer(), dist_moe.ExecutionOptions(**options)
    y = layer.forward(dist_moe_layer.context_of(), options)
    (gradient,) = torch.autograd.grad(y.float().sum(), getattr(layer, of), create_graph=True)
    for leaf in (layer.x, layer.w13, layer.scores):
        loss = gradient.float().nan_to_num().square().sum() + leaf.float().nan_to_num().sum()
        with pytest.raises(RuntimeError, match="no double backward|differentiate twice"):
            torch.autograd.grad(loss, leaf, retain_graph=True)


def test_compiled_gradients_raise_too():
    torch._dynamo.reset()
    with open_context() as context:
        model = Model(context)
        compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        y = compiled(model.leaves)
        x = model.leaves["x"]
        (gradient,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward"):  # PyTorch's own
            (gradient.float().square().sum() + x.float().sum()).backward()
