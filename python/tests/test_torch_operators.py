# SPDX-License-Identifier: Apache-2.0
"""Eager, traced, compiled and checkpointed calls have the bits of the core's."""

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import distmoe
import distmoe.torch
from distmoe.torch import operators
from distmoe.torch.eager import stream_of
from layer import Layer, run_training, same_bits
from torch_model import (
    FP32_GRADIENTS,
    NUM_LAYERS,
    Model,
    expect_same_bits,
    open_context,
    train_config,
)

OPS = torch.ops.distmoe


@pytest.mark.parametrize("wgrad_dtype", [None, pytest.param("fp32", marks=FP32_GRADIENTS)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_layer_has_the_bits_of_the_core(has_bias, wgrad_dtype, device):
    with open_context(train_config(wgrad_dtype=wgrad_dtype), device) as context:
        layer = Layer(context.config, has_bias=has_bias, device=device)
        expected = run_training(context.core, layer)
        layer.scores.requires_grad_()
        given = dict(x=layer.x, **layer.local(context))
        for name, leaf in given.items():
            leaf.requires_grad_()
            if wgrad_dtype == "fp32" and name != "x":
                leaf.grad_dtype = torch.float32
        y = distmoe.torch.routed_experts(
            topk_ids=layer.ids, topk_scores=layer.scores, context=context, **given
        )
        y.backward(layer.dy)
        given["scores"] = layer.scores
        expect_same_bits(dict(y=y, **{name: leaf.grad for name, leaf in given.items()}), expected)


@pytest.fixture(scope="module")
def eager(device):
    """What the model computes eagerly, once for all that must have its bits."""
    with open_context(device=device) as context:
        return Model(context).train()


@pytest.mark.parametrize("slot_factor", [0.0, 1.0])
def test_saved_and_recomputed_layers_have_the_same_bits(eager, slot_factor, device):
    with open_context(train_config(activation_slot_capacity_factor=slot_factor), device) as context:
        expect_same_bits(Model(context).train(), eager)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_checkpointing_has_the_same_bits(eager, use_reentrant, is_whole, device):
    """A block at a time, and both in one region."""
    with open_context(device=device) as context:
        model = Model(context)
        run = functools.partial(checkpoint, use_reentrant=use_reentrant)

        def by_block(leaves):
            h = leaves["x"]
            for index in range(NUM_LAYERS):
                h = run(model.block, h, leaves["scores"], index, leaves)
            return h

        def whole(leaves):
            if not use_reentrant:
                return run(model.forward, leaves)
            names = list(leaves)
            return run(lambda *tensors: model.forward(dict(zip(names, tensors))), *leaves.values())

        for _ in range(2):  # the slot is free again
            expect_same_bits(model.train(whole if is_whole else by_block), eager)


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing_has_the_same_bits(eager, policy, device):
    calls = []

    def choose(_, op, *args, **kwargs):
        if op is not operators.saving_routed_experts_op:
            return CheckpointPolicy.PREFER_RECOMPUTE
        calls.append(op)
        return policy

    contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    with open_context(device=device) as context:
        model = Model(context)
        run = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
        first = context.last_call().call
        expect_same_bits(model.train(lambda leaves: run(model.forward, leaves)), eager)
        # Forwards and backwards; what was not saved ran again.
        again = 0 if policy is CheckpointPolicy.MUST_SAVE else NUM_LAYERS
        assert context.last_call().call - first == 2 * NUM_LAYERS + again
    assert calls


def test_other_hooks_on_saved_tensors_are_honoured(eager, device):
    with open_context(device=device) as context, torch.autograd.graph.save_on_cpu():
        expect_same_bits(Model(context).train(), eager)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_traced_graphs_have_the_same_bits(eager, mode, device):
    """The graph of forward and backward together, traced with real, fake and symbolic tensors."""
    with open_context(device=device) as context:
        model = Model(context)
        names = list(model.leaves)

        def step(dy, ids, *tensors):
            leaves = dict(zip(names, (t.detach().requires_grad_() for t in tensors)))
            y = model.forward(dict(ids=ids, **leaves))
            return y, *torch.autograd.grad(y, list(leaves.values()), dy)

        given = (model.coefficients, model.ids, *(leaf.detach() for leaf in model.leaves.values()))
        graph = make_fx(step, tracing_mode=mode)(*given)
        targets = [node.target for node in graph.graph.nodes]
        assert targets.count(OPS.saving_routed_experts.default) == NUM_LAYERS
        assert targets.count(OPS.routed_experts_backward.default) == NUM_LAYERS
        y, *gradients = graph(*given)
        expect_same_bits(dict(y=y, **dict(zip(names, gradients))), eager)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_have_the_same_bits(eager, backend, device):
    torch._dynamo.reset()
    with open_context(device=device) as context:
        model = Model(context)
        compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
        for _ in range(2):
            expect_same_bits(model.train(compiled), eager)
        with torch.no_grad():
            assert same_bits(compiled(model.leaves), eager["y"])


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_checkpointing_that_leaves_the_experts_to_their_slots(eager, backend, device):
    torch._dynamo.reset()
    with open_context(device=device) as context:
        model = Model(context)
        run = functools.partial(
            checkpoint, use_reentrant=False, context_fn=distmoe.torch.checkpoint_context
        )

        def forward(leaves):
            h = leaves["x"]
            for index in range(NUM_LAYERS):
                h = run(model.block, h, leaves["scores"], index, leaves)
            return h

        if backend is not None:
            forward = torch.compile(forward, fullgraph=True, backend=backend)
        for _ in range(2):
            first = context.last_call().call
            expect_same_bits(model.train(forward), eager)
            assert context.last_call().call - first == 2 * NUM_LAYERS  # none ran again


def test_compiled_models_take_any_number_of_tokens(device):
    torch._dynamo.reset()
    with open_context(device=device) as context:
        models = [Model(context, num_tokens=tokens) for tokens in (11, 5, 16)]
        expected = [model.train() for model in models]
        graphs = []

        def counting(graph, inputs):
            graphs.append(graph)
            return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

        def forward(x, ids, scores, w13, w2):
            return distmoe.torch.routed_experts(x, ids, scores, w13, w2, context)

        compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=counting)
        for model in models:
            leaves = model.leaves
            given = leaves["x"], model.ids, leaves["scores"], leaves["w13.0"], leaves["w2.0"]
            y = compiled(*given)
            y.backward(model.coefficients)
            with torch.no_grad():
                assert same_bits(y, forward(*given))
        assert len(graphs) == 1
        for model, results in zip(models, expected):
            expect_same_bits(model.train(), results)


def operator_inputs(context, needs_grad=False):
    """All inputs of distmoe::routed_experts but the last, `accumulates`."""
    layer = Layer(context.config, has_bias=True, device=context.device)
    floats = [layer.x, layer.scores, *layer.local(context).values()]
    x, scores, *weights = [t.detach().requires_grad_(needs_grad) for t in floats]
    return layer, (x, layer.ids, scores, *weights, [], 0.0, False, None, 0.0, 0.5, context.number)


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_operator_passes_opcheck(device, needs_grad):
    with open_context(device=device) as context:
        for check in (*CHECKS, "test_aot_dispatch_dynamic"):
            _, given = operator_inputs(context, needs_grad)
            torch.library.opcheck(operators.routed_experts_op, (*given, False), test_utils=check)
            context.reset()  # after forwards that were only looked at


def test_the_saving_forward_passes_opcheck(device):
    """All but the check that compares two runs: their saved forwards have different numbers."""
    with open_context(device=device) as context:
        for check in CHECKS:
            _, given = operator_inputs(context)
            torch.library.opcheck(operators.saving_routed_experts_op, given, test_utils=check)
            context.reset()


def test_the_backward_passes_opcheck(device):
    """All but the check that runs it twice: a saved forward has one backward."""
    with open_context(device=device) as context:
        layer, given = operator_inputs(context)
        _, _, scores, *weights = given[:8]
        for needs in ([True] * 6, [True, False, False, True, False, False]):
            for check in CHECKS:
                context.reset()
                *_, saved = operators.saving_routed_experts_op(*given)
                torch.library.opcheck(
                    operators.routed_experts_backward_op,
                    (layer.dy, saved, *weights, scores.dtype, needs, context.number),
                    test_utils=check,
                )


def test_meta_tensors_have_shapes_and_types(device):
    with open_context(device=device) as context:
        _, given = operator_inputs(context)
        meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in given]
        y, counts, saved = operators.saving_routed_experts_op(*meta)
        assert (y.shape, y.dtype, saved.dtype) == (given[0].shape, torch.bfloat16, torch.int64)
        assert counts.shape == (3,)
        assert context.last_call().call == 0


def test_evaluation_leaves_the_slots_alone(eager, device):
    with open_context(device=device) as context:
        model = Model(context)
        y = model.forward(model.leaves)
        with torch.no_grad():
            for _ in range(NUM_LAYERS + 1):
                assert same_bits(model.forward(model.leaves), eager["y"])
        assert same_bits(model.forward({n: t.detach() for n, t in model.leaves.items()}), y)
        y.backward(model.coefficients)
        assert same_bits(model.leaves["x"].grad, eager["x"])


def test_gradients_that_nobody_needs_are_not_made(eager, device):
    with open_context(device=device) as context:
        model = Model(context)
        for name, leaf in model.leaves.items():
            leaf.requires_grad_(name in ("w2.0", "bias13.1"))
        model.forward(model.leaves).backward(model.coefficients)
        assert same_bits(model.leaves["w2.0"].grad, eager["w2.0"])
        assert same_bits(model.leaves["bias13.1"].grad, eager["bias13.1"])
        assert model.leaves["w13.0"].grad is None


def test_a_gradient_that_is_a_broadcast_is_honoured(device):
    with open_context(device=device) as context:
        model = Model(context)
        model.coefficients = torch.ones_like(model.coefficients)
        expected = model.train()
        for leaf in model.leaves.values():
            leaf.grad = None
        model.forward(model.leaves).sum().backward()  # its gradient has strides of 0
        assert same_bits(model.leaves["w13.0"].grad, expected["w13.0"])


def test_a_norm_reaches_forward_and_backward(device):
    with open_context(device=device) as context:
        layer = Layer(context.config, device=device)
        norm = distmoe.PostExpertNorm(eps=1e-5)
        weights = {name: weight.requires_grad_() for name, weight in layer.local(context).items()}
        y = distmoe.torch.routed_experts(**layer.inputs(), **weights, context=context, norm=norm)
        y.backward(layer.dy)
        expected = torch.empty_like(layer.x)
        given, stream = dict(**layer.inputs(), **layer.local(context)), stream_of(expected)
        saved = distmoe.saving_routed_experts(
            context.core, **given, y=expected, norm=norm, stream=stream
        )
        grad_w13 = torch.empty_like(layer.w13)
        plain = layer.w13, layer.w2
        distmoe.routed_experts_backward(
            context.core, saved, layer.dy, *plain, grad_w13=grad_w13, stream=stream
        )
        assert same_bits(y, expected) and same_bits(weights["w13"].grad, grad_w13)
