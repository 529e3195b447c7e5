# SPDX-License-Identifier: Apache-2.0
"""RoutedExperts as a module among modules."""

import copy

import pytest
import torch

import distmoe.torch
from layer import Layer, make_config, same_bits
from torch_model import open_context, train_config


def test_it_calls_its_weights_with_any_leading_dimensions(device):
    with open_context(device=device) as context:
        module = distmoe.torch.RoutedExperts(context, has_bias=True)
        layer = Layer(context.config, num_tokens=12, device=device)
        y = module(layer.x.view(3, 4, -1), layer.ids.view(3, 4, -1), layer.scores.view(3, 4, -1))
        assert y.shape == (3, 4, 32)
        y.backward(layer.dy.view(3, 4, -1))
        expected = distmoe.torch.routed_experts(
            **layer.inputs(), **dict(module.named_parameters()), context=context
        )
        assert same_bits(y.view(12, -1), expected)
        assert all(p.grad is not None and p.grad.any() for p in module.parameters())
        context.reset()  # the second forward has no backward


def test_its_parameters_are_those_of_this_ranks_experts(device):
    with open_context(device=device) as context:
        module = distmoe.torch.RoutedExperts(context)
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert shapes == {"w13": (7, 48, 32), "w2": (7, 32, 24)}
        assert module.w13.abs().max() <= 32**-0.5 and module.w2.abs().max() <= 24**-0.5
        assert "7 of 7 experts, D=32, F=24, K=3, swiglu" in repr(module)


def test_state_moves_between_modules(device):
    with open_context(device=device) as context:
        first = distmoe.torch.RoutedExperts(context)
        second = distmoe.torch.RoutedExperts(context)
        assert not same_bits(first.w13, second.w13)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert same_bits(first.w13, second.w13)


def test_copies_share_the_context(device):
    with open_context(device=device) as context:
        module = distmoe.torch.RoutedExperts(context)
        copied = copy.deepcopy(module)
        assert copied.context is context
        assert same_bits(copied.w2, module.w2) and copied.w2.data_ptr() != module.w2.data_ptr()


def test_inference_modules_need_no_grad(device):
    with open_context(make_config(inference=True), device) as context:
        module = distmoe.torch.RoutedExperts(context)
        layer = Layer(context.config, device=device)
        assert not any(p.requires_grad for p in module.parameters())
        assert module(layer.x, layer.ids, layer.scores).isfinite().all()


def test_an_optimizer_trains_it(device):
    with open_context(train_config(), device) as context:
        torch.manual_seed(0)
        module = distmoe.torch.RoutedExperts(context, accumulate_wgrad=True)
        layer = Layer(context.config, device=device)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        losses = []
        for _ in range(20):
            y = module(layer.x, layer.ids, layer.scores)
            loss = (y.float() - layer.dy.float()).square().mean()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0]


def test_compiled_modules_have_the_same_bits(device):
    torch._dynamo.reset()
    with open_context(device=device) as context:
        module = distmoe.torch.RoutedExperts(context, has_bias=True)
        layer = Layer(context.config, device=device)
        given = (layer.x, layer.ids, layer.scores)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        results = []
        for forward in (module, compiled):
            module.zero_grad()
            y = forward(*given)
            y.backward(layer.dy)
            results.append([y, *(p.grad.clone() for p in module.parameters())])
        assert all(same_bits(left, right) for left, right in zip(*results))


def test_a_module_without_experts_takes_part():
    config = make_config(num_experts=3)

    def body(communicator):
        with distmoe.torch.create_context(config, communicator, device="cpu") as context:
            module = distmoe.torch.RoutedExperts(context)
            layer = Layer(config, seed=context.rank)
            y = module(layer.x, layer.ids, layer.scores)
            y.backward(layer.dy)
            assert module.w13.grad.shape == module.w13.shape

    distmoe.run_thread_group(4, body)


@pytest.mark.parametrize("name", ["rank", "size", "memory_plan"])
def test_contexts_repeat_what_the_core_says(name, device):
    with open_context(device=device) as context:
        assert getattr(context, name) == getattr(context.core, name)
        assert "rank 0 of 1" in repr(context)
    assert "closed" in repr(context)
