# SPDX-License-Identifier: Apache-2.0
"""accumulate_wgrad adds in place: one rounding, the same storage, one call of every hook."""

import pytest
import torch

import distmoe
import distmoe.torch
from distmoe.torch.eager import stream_of
from layer import Layer, same_bits
from torch_model import FP32_GRADIENTS, open_context, train_config

NAMES = ("w13", "w2", "bias13", "bias2")


def make_module(context, **options):
    module = distmoe.torch.RoutedExperts(context, has_bias=True, accumulate_wgrad=True, **options)
    layer = Layer(context.config, has_bias=True, device=context.device)
    with torch.no_grad():
        for name, weight in layer.local(context).items():
            getattr(module, name).copy_(weight)
    return module, layer


def run(module, layer, times=1):
    for _ in range(times):
        module(layer.x, layer.ids, layer.scores).backward(layer.dy)


def core_sums(context, layer, memory, times):
    """The gradients that the core adds to `memory`, `times` times."""
    for _ in range(times):
        y = torch.empty_like(layer.x)
        weights, stream = layer.local(context), stream_of(y)
        given = dict(**layer.inputs(), **weights, y=y, stream=stream)
        saved = distmoe.saving_routed_experts(context.core, **given)
        destinations = {f"grad_{name}": memory[name] for name in NAMES}
        distmoe.routed_experts_backward(
            context.core,
            saved,
            layer.dy,
            **weights,
            **destinations,
            accumulate=True,
            stream=stream,
        )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=FP32_GRADIENTS)]
)
def test_gradients_have_the_bits_of_the_core(dtype, device):
    with open_context(
        train_config(wgrad_dtype="fp32" if dtype == torch.float32 else None), device
    ) as context:
        module, layer = make_module(context)
        memory, calls = {}, []
        for name in NAMES:
            parameter = getattr(module, name)
            if dtype == torch.float32:
                parameter.grad_dtype = torch.float32
            parameter.grad = torch.full_like(parameter, 0.5, dtype=dtype)
            parameter.register_post_accumulate_grad_hook(lambda p: calls.append(id(p)))
            memory[name] = parameter.grad.clone()
        places = {name: getattr(module, name).grad.data_ptr() for name in NAMES}
        run(module, layer, times=3)
        core_sums(context, layer, memory, times=3)
        for name in NAMES:
            gradient = getattr(module, name).grad
            assert gradient.data_ptr() == places[name], name
            assert same_bits(gradient, memory[name]), name
        assert sorted(calls) == sorted(3 * [id(getattr(module, name)) for name in NAMES])


def test_storage_stays_where_somebody_else_holds_the_gradient(device):
    with open_context(device=device) as context:
        module, layer = make_module(context)
        run(module, layer)
        held = [getattr(module, name).grad for name in NAMES]
        run(module, layer, times=2)
        for name, gradient in zip(NAMES, held):
            assert getattr(module, name).grad.data_ptr() == gradient.data_ptr()


def test_the_first_gradient_is_that_of_autograd(device):
    with open_context(device=device) as context:
        module, layer = make_module(context)
        run(module, layer)
        plain = distmoe.torch.RoutedExperts(context, has_bias=True)
        plain.load_state_dict(module.state_dict())
        run(plain, layer)
        for name in NAMES:
            assert same_bits(getattr(module, name).grad, getattr(plain, name).grad)


def test_a_parameter_of_two_layers_is_added_to_twice(device):
    with open_context(device=device) as context:
        module, layer = make_module(context)
        run(module, layer)  # there is a gradient to add to
        memory = {name: getattr(module, name).grad.clone() for name in NAMES}
        places = {name: getattr(module, name).grad.data_ptr() for name in NAMES}
        calls = []
        module.w13.register_post_accumulate_grad_hook(calls.append)
        ys = [module(layer.x, layer.ids, layer.scores) for _ in range(2)]
        torch.autograd.backward(ys, [layer.dy, layer.dy])
        core_sums(context, layer, memory, times=2)
        for name in NAMES:
            gradient = getattr(module, name).grad
            assert gradient.data_ptr() == places[name] and same_bits(gradient, memory[name]), name
        assert len(calls) == 1


def test_views_of_parameters_are_added_to(device):
    with open_context(device=device) as context:
        module, layer = make_module(context)
        run(module, layer)
        memory = {name: getattr(module, name).grad.clone() for name in NAMES}
        place = module.w13.grad.data_ptr()
        halves = module.w13.view(module.w13.shape[0], 2, -1, module.w13.shape[2])
        y = distmoe.torch.routed_experts(
            **layer.inputs(),
            w13=halves,
            w2=module.w2,
            bias13=module.bias13,
            bias2=module.bias2,
            context=context,
            accumulate_wgrad=True,
        )
        y.backward(layer.dy)
        core_sums(context, layer, memory, times=1)
        assert module.w13.grad.data_ptr() == place
        assert same_bits(module.w13.grad, memory["w13"])


@FP32_GRADIENTS
def test_the_fp32_sum_of_a_view_is_not_rounded(device):
    with open_context(train_config(wgrad_dtype="fp32"), device) as context:
        module, layer = make_module(context)
        for name in NAMES:
            getattr(module, name).grad_dtype = torch.float32
        run(module, layer)
        exact = module.w13.grad.clone()
        module.w13.grad.fill_(1.0)
        place = module.w13.grad.data_ptr()
        given = {name: getattr(module, name) for name in NAMES}
        given["w13"] = module.w13.view(module.w13.shape[0], 2, -1, module.w13.shape[2])
        distmoe.torch.routed_experts(
            **layer.inputs(), **given, context=context, accumulate_wgrad=True
        ).backward(layer.dy)
        assert module.w13.grad.data_ptr() == place
        expected = 1 + exact.bfloat16().float()  # as PyTorch hands a gradient through a BF16 view
        assert torch.equal(module.w13.grad, expected) and exact.any()
        assert not torch.equal(expected, expected.bfloat16().float())


def test_what_cannot_be_added_to_is_refused(device):
    with open_context(device=device) as context:
        module, layer = make_module(context)
        with pytest.raises(ValueError, match="accumulate_wgrad needs w13 to be a parameter"):
            distmoe.torch.routed_experts(
                **layer.inputs(),
                w13=module.w13 * 2,
                w2=module.w2,
                context=context,
                accumulate_wgrad=True,
            )
        context.reset()
        shape = module.w13.shape
        transposed = module.w13.new_zeros(shape[0], shape[2], shape[1])
        module.w13.grad = transposed.mT
        before = module.w13.grad.clone()
        with pytest.raises(ValueError, match="the gradient of w13 must be contiguous"):
            run(module, layer)
        assert same_bits(module.w13.grad, before)


def test_traced_graphs_refuse_it(device):
    torch._dynamo.reset()
    with open_context(device=device) as context:
        module, layer = make_module(context)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="accumulate_wgrad adds to parameter.grad"):
            compiled(layer.x, layer.ids, layer.scores)
