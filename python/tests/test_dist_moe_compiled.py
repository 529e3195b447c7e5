# SPDX-License-Identifier: Apache-2.0
"""A compiled call of dist_moe has the bits of an eager one, forward and backward."""

import pytest
import torch

import distmoe
from dist_moe_layer import Layer, assert_same, context_of, norm_options
from distmoe import dist_moe
from layer import same_bits


def compiled(backend):
    torch._dynamo.reset()
    return torch.compile(dist_moe.routed_experts, fullgraph=True, backend=backend)


def train(call, layer, context, weights=None, **options):
    w13, w2 = weights or (layer.w13, layer.w2)
    y = call(layer.x, layer.ids, layer.scores, w13, w2, context, **options)
    y.backward(layer.dy)
    results = dict(y=y.detach())
    for name in ("x", "scores", "w13", "w2"):
        leaf = getattr(layer, name)
        results[name], leaf.grad = leaf.grad, None
    return results


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training_has_the_bits_of_eager(backend, device):
    layer, context = Layer(device=device), context_of(device)
    expected = train(dist_moe.routed_experts, layer, context)
    call = compiled(backend)
    for _ in range(2):
        assert_same(train(call, layer, context), expected)
    with torch.no_grad():
        arguments = (layer.x, layer.ids, layer.scores, layer.w13, layer.w2, context)
        assert same_bits(call(*arguments), expected["y"])


@pytest.mark.parametrize("rows", [3, 5])
def test_weights_with_gate_and_up_apart_and_other_token_counts(rows):
    layer, context = Layer(), context_of()
    halves = layer.w13.view(layer.w13.shape[0], 2, -1, layer.w13.shape[2])
    call = compiled("aot_eager")
    for tokens in (rows, rows + 1):
        given = (layer.x[:tokens], layer.ids[:tokens], layer.scores[:tokens], halves, layer.w2)
        results = []
        for routed_experts in (call, dist_moe.routed_experts):
            y = routed_experts(*given, context)
            gradients = torch.autograd.grad(y, [layer.x, layer.w13], layer.dy[:tokens])
            results.append(dict(y=y.detach(), x=gradients[0], w13=gradients[1]))
        assert_same(*results)


def test_norm_and_clip_counts():
    layer, context = Layer(), context_of()
    counts = [torch.zeros(3), torch.zeros(3)]
    for options in (
        [norm_options()] * 2,
        [
            dist_moe.ExecutionOptions(swiglu_clip_stats_out_3=each, swiglu_clip_limit=0.5)
            for each in counts
        ],
    ):
        expected = train(dist_moe.routed_experts, layer, context, options=options[0])
        results = train(compiled("aot_eager"), layer, context, options=options[1])
        assert_same(results, expected)
    assert counts[0].any() and torch.equal(*counts)


def test_prepared_weights():
    scaled = dist_moe.BlockScaledConfig()
    layer, context = Layer(), context_of(block_scaled=scaled)
    weights = [dist_moe.prepare_block_scaled_weight(w, scaled) for w in (layer.w13, layer.w2)]
    expected = train(dist_moe.routed_experts, layer, context, weights)
    assert_same(train(compiled("aot_eager"), layer, context, weights), expected)


def test_a_closed_context_and_programs_are_refused():
    layer, context = Layer(), context_of()
    call = compiled("aot_eager")
    arguments = (layer.x, layer.ids, layer.scores, layer.w13, layer.w2, context)
    program = dist_moe.ExecutionOptions(weights_preprocess_fn=lambda weight: weight)
    with pytest.raises(Exception, match="require eager mode"):
        call(*arguments, options=program)
    call(*arguments).backward(layer.dy)
    context.close()
    with pytest.raises(distmoe.ClosedError, match="closed"):
        call(*arguments)
