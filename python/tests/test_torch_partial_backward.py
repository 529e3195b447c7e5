# SPDX-License-Identifier: Apache-2.0
"""A backward that does not ask for a weight's gradient leaves parameter.grad as it was."""

import pytest
import torch

import dist_moe_layer
import distmoe.torch
from distmoe import dist_moe
from layer import GRADIENTS, Layer, same_bits
from torch_model import open_context

WEIGHTS = GRADIENTS[2:]


class Accumulating:
    """A layer whose leaves all have a gradient already, and the call that adds to them."""

    def __init__(self, context):
        self.context, layer = context, Layer(context.config, has_bias=True, device=context.device)
        self.dy, self.ids = layer.dy, layer.ids
        self.leaves = dict(x=layer.x, scores=layer.scores, **layer.local(context))
        for leaf in self.leaves.values():
            leaf.requires_grad_()
        self.forward().backward(self.dy)

    def forward(self, **changes):
        leaves = {**self.leaves, **changes}
        x, scores = leaves.pop("x"), leaves.pop("scores")
        return distmoe.torch.routed_experts(
            x, self.ids, scores, **leaves, context=self.context, accumulate_wgrad=True
        )

    def state(self):
        return {
            name: (leaf.grad, leaf.grad.data_ptr(), leaf.grad.clone())
            for name, leaf in self.leaves.items()
        }

    def expect_untouched(self, before, names):
        for name in names:
            gradient, place, value = before[name]
            assert self.leaves[name].grad is gradient, name
            assert gradient.data_ptr() == place and same_bits(gradient, value), name


@pytest.fixture
def layer(device):
    with open_context(device=device) as context:
        yield Accumulating(context)


def test_autograd_grad_of_x_touches_no_parameter(layer):
    before, plain = layer.state(), layer.state()["x"][2]
    (grad_x,) = torch.autograd.grad(layer.forward(), layer.leaves["x"], layer.dy)
    assert same_bits(grad_x, plain)
    layer.expect_untouched(before, GRADIENTS)


def test_autograd_grad_of_weights_returns_fresh_ones(layer):
    before = layer.state()
    leaves = [layer.leaves[name] for name in WEIGHTS]
    gradients = torch.autograd.grad(layer.forward(), leaves, layer.dy)
    layer.expect_untouched(before, GRADIENTS)
    for name, gradient in zip(WEIGHTS, gradients, strict=True):
        assert same_bits(gradient, before[name][2]), name  # of the first backward
        assert gradient.data_ptr() != before[name][1]


@pytest.mark.parametrize("inputs", [("x",), ("x", "w2"), ("w13",), ("bias13", "scores")])
def test_backward_adds_to_its_inputs_alone(layer, inputs):
    before = layer.state()
    layer.forward().backward(layer.dy, inputs=[layer.leaves[name] for name in inputs])
    layer.expect_untouched(before, set(GRADIENTS) - set(inputs))
    for name in inputs:
        _, place, value = before[name]
        gradient = layer.leaves[name].grad
        assert gradient.data_ptr() == place and not same_bits(gradient, value), name


def test_a_view_of_a_parameter_is_asked_like_the_parameter(layer):
    before = layer.state()
    w13 = layer.leaves["w13"]
    halves = w13.view(w13.shape[0], 2, -1, w13.shape[2])
    torch.autograd.grad(layer.forward(w13=halves), layer.leaves["x"], layer.dy)
    (gradient,) = torch.autograd.grad(layer.forward(w13=halves), w13, layer.dy)
    layer.expect_untouched(before, GRADIENTS)
    assert same_bits(gradient, before["w13"][2])


def test_a_recorded_backward_adds_out_of_place_as_pytorch_does(layer):
    before = layer.state()
    layer.forward().backward(layer.dy, create_graph=True)
    for name in WEIGHTS:
        held, _, value = before[name]
        assert same_bits(held, value) and layer.leaves[name].grad is not held, name
        expected = value.float() * 2  # the second gradient is the first's, doubled without rounding
        assert torch.equal(layer.leaves[name].grad.float(), expected), name


def test_memory_is_freed_by_zero_grad(layer):
    for _ in range(2):
        layer.forward().backward(layer.dy)
    assert not list(distmoe.torch.accumulation._taken)


# --- distmoe.dist_moe ---


def gradients_of(layer, context, options, *names):
    """As torch.autograd.grad gives them, after a backward that left parameters a gradient."""
    dist_moe.routed_experts(
        layer.x, layer.ids, layer.scores, layer.w13, layer.w2, context
    ).backward(layer.dy)
    before = {name: getattr(layer, name).grad for name in ("w13", "w2")}
    values = {name: gradient.clone() for name, gradient in before.items()}
    y = layer.forward(context, options)
    gradients = torch.autograd.grad(
        y, [getattr(layer, name) for name in names], layer.dy, allow_unused=True
    )
    for name, gradient in before.items():
        assert getattr(layer, name).grad is gradient and same_bits(gradient, values[name]), name
    return gradients, values


@pytest.mark.parametrize("has_owners", [False, True])
def test_dist_moe_in_place_accumulation_is_asked_first(has_owners):
    layer = dist_moe_layer.Layer()
    owners = (layer.w13, layer.w2) if has_owners else None
    options = dist_moe.ExecutionOptions(inplace_wgrad_accum=True, wgrad_parameter_owners=owners)
    gradients_of(layer, dist_moe_layer.context_of(), options, "x")
    layer.x.grad = layer.w13.grad = layer.w2.grad = None
    gradients, values = gradients_of(layer, dist_moe_layer.context_of(), options, "w13", "w2")
    assert all(map(same_bits, gradients, values.values()))


@pytest.mark.parametrize("name", ["wgrad_destination_fn", "wgrad_postprocess_fn"])
def test_dist_moe_programs_see_no_gradient_that_is_not_asked_for(name):
    def never(*_):
        raise AssertionError("called for a gradient that nobody asked for")

    options = dist_moe.ExecutionOptions(**{name: never})
    gradients_of(dist_moe_layer.Layer(), dist_moe_layer.context_of(), options, "x", "scores")


def test_dist_moe_destinations_take_the_gradients_that_are_asked_for():
    layer, asked = dist_moe_layer.Layer(), []

    def destination(name, shape, dtype, device):
        asked.append(name)
        return torch.zeros(shape, dtype=dtype, device=device), False

    options = dist_moe.ExecutionOptions(wgrad_destination_fn=destination)
    gradients_of(layer, dist_moe_layer.context_of(), options, "x", "w2")
    assert asked == ["w2"]


def test_what_a_dist_moe_postprocess_closes_over_is_left_alone():
    layer, gain = dist_moe_layer.Layer(), torch.nn.Parameter(torch.ones(dist_moe_layer.D))
    options = dist_moe.ExecutionOptions(experts_output_postprocess=lambda rows: rows * gain)
    context = dist_moe_layer.context_of()
    plain = layer.train(context, options)
    of_everything, gain.grad = gain.grad, None
    (gradient,) = torch.autograd.grad(layer.forward(context, options), layer.x, layer.dy)
    assert same_bits(gradient, plain["x"]) and gain.grad is None
    layer.forward(context, options).backward(layer.dy, inputs=[layer.w2, gain])
    assert same_bits(layer.w2.grad, plain["w2"]) and gain.grad is None
    y = layer.forward(context, options)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(y, gain, layer.dy, retain_graph=True)
    y.backward(layer.dy)
    assert same_bits(gain.grad, of_everything) and gain.grad.any()
    frozen = dist_moe_layer.Layer(trains=False)
    frozen.scores.requires_grad_()
    (gradient,) = torch.autograd.grad(frozen.forward(context, options), frozen.scores, frozen.dy)
    assert same_bits(gradient, plain["scores"]) and same_bits(gain.grad, of_everything)
