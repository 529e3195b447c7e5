# SPDX-License-Identifier: Apache-2.0
"""What only a GPU has: values beside the CPU's, streams, CUDA graphs, and tensors elsewhere."""

import pytest
import torch
from devices import needs_gpu

import distmoe
import distmoe.torch
from distmoe.torch.eager import stream_of
from layer import (
    BF16,
    GRADIENTS,
    Layer,
    make_config,
    reference,
    relative_error,
    run_forward,
    run_training,
    same_bits,
)
from torch_model import Model, expect_same_bits, open_context, train_config

pytestmark = needs_gpu


def test_values_are_as_near_to_the_exact_ones_as_the_cpus():
    config = train_config()
    layer = Layer(config, has_bias=True)
    leaves = [getattr(layer, name) for name in GRADIENTS]
    for leaf in leaves:
        leaf.requires_grad_()
    exact_y = reference(layer)
    exact = dict(zip(GRADIENTS, torch.autograd.grad(exact_y, leaves, layer.dy.double())))
    results = {}
    for device in ("cpu", "cuda"):
        with open_context(config, device) as context:
            own = Layer(config, has_bias=True, device=device)
            results[device] = {n: t.cpu() for n, t in run_training(context.core, own).items()}
    for name, value in dict(y=exact_y, **exact).items():
        errors = {device: relative_error(r[name], value) for device, r in results.items()}
        assert errors["cuda"] <= 1.5 * errors["cpu"] + 2**-9, (name, errors)


@pytest.mark.parametrize("is_default", [True, False])
def test_calls_are_ordered_with_the_current_stream(is_default):
    """x is written by PyTorch's kernels just before, y is read just after, nobody synchronises."""
    with open_context(make_config(inference=True), "cuda") as context:
        layer = Layer(context.config, device="cuda")
        expected = run_forward(context.core, layer)
        torch.cuda.synchronize()
        stream = torch.cuda.default_stream() if is_default else torch.cuda.Stream()
        assert stream_of(layer.x) != 0
        given, x = layer.local(context), torch.full_like(layer.x, float("nan"))
        with torch.cuda.stream(stream):
            for _ in range(20):
                torch.cuda._sleep(2_000_000)  # about a millisecond
                x.copy_(layer.x)
                y = distmoe.torch.routed_experts(
                    x, layer.ids, layer.scores, **given, context=context
                )
                copy = y.clone()
                x.fill_(float("nan"))
                assert same_bits(copy, expected)
        context.check()


def test_captured_forwards_have_the_bits_of_eager_ones():
    with open_context(make_config(inference=True), "cuda") as context:
        layers = [Layer(context.config, seed=seed, device="cuda") for seed in range(3)]
        expected = [run_forward(context.core, layer) for layer in layers]
        first = layers[0]
        given = [tensor.clone() for tensor in first.inputs().values()]
        weights = first.local(context)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = distmoe.torch.routed_experts(*given, **weights, context=context)
        for layer, value in [*zip(layers, expected), (first, expected[0])]:
            for place, tensor in zip(given, layer.inputs().values()):
                place.copy_(tensor)
            y.fill_(float("nan"))
            graph.replay()
            assert same_bits(y, value)
        context.check()


@pytest.mark.parametrize("slot_factor", [0.0, 1.0])
def test_captured_steps_have_the_bits_of_eager_ones(slot_factor):
    """Forward and backward of two layers in one graph, saved and computed again."""
    config = train_config(activation_slot_capacity_factor=slot_factor)
    with open_context(config, "cuda") as context:
        model = Model(context)
        eager = model.train()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # .grad is made by a warm-up, as PyTorch asks
            model.train()
        torch.cuda.current_stream().wait_stream(side)
        graph, leaves = torch.cuda.CUDAGraph(), model.leaves
        with torch.cuda.graph(graph):
            y = model.forward(leaves)
            gradients = torch.autograd.grad(y, list(leaves.values()), model.coefficients)
        for _ in range(3):
            for tensor in (y, *gradients):
                tensor.detach().fill_(float("nan"))
            graph.replay()
            results = dict(y=y.detach(), **dict(zip(leaves, gradients)))
            expect_same_bits(results, eager)
        context.check()
        expect_same_bits(model.train(), eager)  # eager calls go on in the same slots


def test_graphed_callables_have_the_bits_of_eager_ones():
    """torch.cuda.make_graphed_callables: forward and backward as graphs of their own."""
    with open_context(train_config(max_moe_layers_per_activation_slot=1), "cuda") as context:
        module = distmoe.torch.RoutedExperts(context, has_bias=True)
        layer = Layer(context.config, device="cuda")
        layer.scores.requires_grad_()
        layer.x.requires_grad_()

        def train(forward):
            module.zero_grad()
            layer.x.grad = layer.scores.grad = None
            y = forward(layer.x, layer.ids, layer.scores)
            y.backward(layer.dy)
            leaves = dict(module.named_parameters(), x=layer.x, scores=layer.scores)
            return dict(
                y=y.detach().clone(), **{n: leaf.grad.clone() for n, leaf in leaves.items()}
            )

        eager = train(module.forward)
        sample = (layer.x.detach().requires_grad_(), layer.ids, layer.scores.detach())
        sample[2].requires_grad_()
        graphed = torch.cuda.make_graphed_callables(module, sample)
        for _ in range(3):
            expect_same_bits(train(graphed), eager)
        context.check()


def test_threads_that_share_a_gpu_have_a_stream_each():
    """The bits of one rank; on PyTorch's one default stream a rank would wait for its timeout."""
    config, shared = train_config(), {}

    def call(context, rank):
        layer = Layer(config, num_tokens=5 + rank, seed=rank, device="cuda")
        given = dict(**layer.inputs(), **layer.local(context))
        return distmoe.torch.routed_experts(**given, context=context)

    def body(communicator):
        rank = communicator.rank()
        with distmoe.torch.create_context(config, communicator, device="cuda") as context:
            with torch.cuda.stream(torch.cuda.Stream()):
                shared[rank] = call(context, rank)
                torch.cuda.current_stream().synchronize()
            context.check()

    distmoe.run_thread_group(2, body)
    assert sorted(shared) == [0, 1]
    with open_context(config, "cuda") as context:
        for rank, y in shared.items():
            assert same_bits(y, call(context, rank))


def test_contexts_are_not_made_inside_a_capture():
    with open_context(make_config(inference=True), "cuda") as context:
        layer = Layer(context.config, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer.x * 2
            with pytest.raises(distmoe.UnsupportedError, match="captured into a CUDA graph"):
                distmoe.torch.create_context(make_config(), device="cuda")
        graph.replay()
        assert same_bits(y, layer.x * 2)


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_scores", "w13", "w2"])
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_tensors_of_another_device_are_refused(home, name):
    with open_context(device=home) as context:
        layer = Layer(context.config, device=home)
        given = dict(**layer.inputs(), **layer.local(context))
        expected = distmoe.torch.routed_experts(**given, context=context)
        other = given[name].to("cuda" if home == "cpu" else "cpu")
        for is_saving in (False, True):
            changed = {**given, name: other}
            changed["w2"] = changed["w2"].detach().requires_grad_(is_saving)
            with pytest.raises(distmoe.InvalidArgumentError, match=f"{name} must be in "):
                distmoe.torch.routed_experts(**changed, context=context)
        assert same_bits(distmoe.torch.routed_experts(**given, context=context), expected)


def test_ids_outside_the_contract_are_found_by_check():
    with open_context(make_config(inference=True), "cuda") as context:
        layer = Layer(context.config, device="cuda")
        expected = run_forward(context.core, layer)
        layer.ids[0, 0] = 7
        assert run_forward(context.core, layer).isnan().all()
        with pytest.raises(distmoe.InvalidArgumentError, match="7"):
            context.check()
        layer.ids = Layer(context.config).ids.cuda()
        assert same_bits(run_forward(context.core, layer), expected)
        context.check()


def test_arrays_of_other_libraries_are_taken():
    cupy = pytest.importorskip("cupy")
    with open_context(make_config(inference=True), "cuda") as context:
        layer = Layer(context.config, device="cuda")
        expected = run_forward(context.core, layer)
        torch.cuda.synchronize()

        def array(tensor):
            if tensor.dtype != BF16:
                return cupy.from_dlpack(tensor)
            return distmoe.Reinterpreted(cupy.from_dlpack(tensor.view(torch.int16)), "bf16")

        y = cupy.zeros(layer.x.shape, cupy.int16)
        given = dict(**layer.inputs(), **layer.local(context))
        given = {name: array(tensor) for name, tensor in given.items()}
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        distmoe.routed_experts(
            context.core, **given, y=distmoe.Reinterpreted(y, "bf16"), stream=stream.ptr
        )
        stream.synchronize()
        assert same_bits(torch.from_dlpack(y).view(BF16), expected)
