# SPDX-License-Identifier: Apache-2.0
"""A program written against dist_moe computes with distmoe: layouts, ranks, slots, refusals."""

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import distmoe
from dist_moe_layer import D, E, F, K, Layer, T, assert_same, config, context_of, norm_options
from distmoe import dist_moe
from layer import relative_error, same_bits


@pytest.fixture
def layer():
    return Layer()


@pytest.fixture
def plain(layer):
    return layer.train(context_of())


def test_the_plain_call_computes_the_layer(device):
    layer = Layer(device=device)
    plain = layer.train(context_of(device))
    w13, w2 = (w.detach().double().requires_grad_() for w in (layer.w13, layer.w2))
    x, scores = (t.detach().double().requires_grad_() for t in (layer.x, layer.scores))
    rows = []
    for token in range(T):
        row = torch.zeros(D, dtype=torch.float64, device=device)
        for k in range(K):
            expert = int(layer.ids[token, k])
            if expert >= 0:
                gate, up = (w13[expert] @ x[token]).chunk(2)
                row = row + scores[token, k] * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    y = torch.stack(rows)
    y.backward(layer.dy.double())
    assert relative_error(plain["y"], y) < 6e-3
    for name, exact in dict(x=x, w13=w13, w2=w2).items():
        assert relative_error(plain[name], exact.grad) < 1.2e-2, name
    is_on = layer.ids >= 0
    assert relative_error(plain["scores"][is_on], scores.grad[is_on]) < 6e-3
    assert plain["scores"][1, 1] == 0


def test_tokens_are_exact_or_at_most(layer):
    few = (layer.x[:3], layer.ids[:3], layer.scores[:3], layer.w13, layer.w2)
    assert dist_moe.routed_experts(*few, context_of()).shape == (3, D)
    exact = context_of(max_num_local_input_tokens=None, num_local_input_tokens=T)
    assert exact.num_local_input_tokens == exact.max_num_local_input_tokens == T
    with pytest.raises(ValueError, match="must equal num_local_input_tokens=6, got 3"):
        dist_moe.routed_experts(*few, exact)
    with pytest.raises(ValueError, match=r"must be in \[1, 6\], got 0"):
        dist_moe.routed_experts(*(t[:0] for t in few[:3]), *few[3:], context_of())


@pytest.mark.parametrize(
    "shapes", [((E, 2, F, D), (E, D, F)), ((E * 2 * F, D), (E * D, F))], ids=["4-D", "flat"]
)
def test_layouts_give_the_same_bits_in_their_own_shape(layer, plain, shapes):
    for name, shape in zip(("w13", "w2"), shapes):
        setattr(layer, name, getattr(layer, name).detach().view(shape).requires_grad_())
    results = layer.train(context_of())
    assert (results["w13"].shape, results["w2"].shape) == shapes
    reshaped = {name: value.view_as(results[name]) for name, value in plain.items()}
    assert_same(results, reshaped)


def test_clip_statistics_are_written(device):
    layer = Layer(device=device)
    counts = torch.full((3,), float("nan"), device=device)
    options = dist_moe.ExecutionOptions(swiglu_clip_stats_out_3=counts, swiglu_clip_limit=0.5)
    layer.forward(context_of(device), options).backward(layer.dy)
    num_rows = int((layer.ids >= 0).sum())
    assert counts[2] == num_rows * F and 0 < counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize("has_callback", [False, True])
def test_ranks_share_the_experts(has_callback):
    experts = 4
    callback = (lambda rows: rows * 1) if has_callback else None
    options = dist_moe.ExecutionOptions(experts_output_postprocess=callback)
    generator = torch.Generator().manual_seed(6)
    shapes = dict(x=(T, D), w13=(experts, 2 * F, D), w2=(experts, D, F), dy=(T, D))
    given = {name: torch.randn(s, generator=generator).bfloat16() for name, s in shapes.items()}
    ids = torch.stack([torch.randperm(experts, generator=generator)[:K] for _ in range(T)])
    scores = torch.rand(T, K, generator=generator)

    def train(group, tokens, own):
        context = dist_moe.create_context(
            group=group,
            config=config(num_experts=experts, device_scratch_capacity_factor=2.0),
            device="cpu",
        )
        x, w13, w2 = (
            each.clone().requires_grad_()
            for each in (given["x"][tokens], given["w13"][own], given["w2"][own])
        )
        y = dist_moe.routed_experts(
            x, ids[tokens], scores[tokens], w13, w2, context, options=options
        )
        y.backward(given["dy"][tokens])
        return dict(y=y.detach(), x=x.grad, w13=w13.grad, w2=w2.grad)

    alone = train(None, slice(0, T), slice(0, experts))
    places = [(slice(0, 2), slice(0, 2)), (slice(2, T), slice(2, experts))]
    with ThreadPoolExecutor(2) as pool:
        group = distmoe.make_thread_group(2)
        ranks = list(pool.map(lambda rank: train(group[rank], *places[rank]), range(2)))
    assert_same({name: torch.cat([rank[name] for rank in ranks]) for name in alone}, alone)
    with pytest.raises(ValueError, match="must be a multiple of the 2 ranks, got 5"):
        dist_moe.create_context(group=distmoe.make_thread_group(2)[0], config=config())


def test_peers_are_not_emulated():
    with pytest.raises(distmoe.UnsupportedError, match="peers are not emulated"):
        dist_moe.create_context(group=None, config=config(), emulate_peer_buffers=True)


def test_slots_and_life(layer, plain):
    context = context_of(num_activation_slots=2)
    context.select_activation_slot(1, 1)
    first = layer.forward(context)
    context.select_activation_slot(0, 2)
    assert_same(layer.train(context), plain)
    first.backward(layer.dy)
    assert same_bits(layer.w2.grad, plain["w2"])
    with pytest.raises(ValueError, match=r"activation slot must be in \[0, 2\), got 2"):
        context.select_activation_slot(2, 1)
    with pytest.raises(ValueError, match=r"num_moe_layers must be in \[1, 2\], got 3"):
        context.select_activation_slot(0, 3)
    assert context.context_id.isdigit()
    context.close()
    context.close()
    for use in (lambda: context.context_id, context.reset, lambda: layer.forward(context)):
        with pytest.raises(RuntimeError, match="is not live"):
            use()


def test_an_inference_context_takes_no_gradients(layer):
    context = context_of(inference=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="inference context"):
        layer.forward(context)
    weight = torch.linspace(0.5, 1.5, D).bfloat16()
    y = Layer(trains=False).forward(context, norm_options(weight=weight, gain_center=1.0))
    assert y.isfinite().all() and not y.requires_grad


def test_ignored_tuning_is_said_once(caplog):
    preset = config(bf16_grouped_gemm_preset="2cta1mma_bm256_bn256")
    with caplog.at_level(logging.INFO, "distmoe.dist_moe"):
        dist_moe.create_context(group=None, config=preset, device="cpu")
    said = [record.message for record in caplog.records if "without effect" in record.message]
    assert said == ["bf16_grouped_gemm_preset: Blackwell tuning, without effect here"]


def test_mxfp8_contexts_quantise_the_weights_that_they_are_given(layer, plain):
    staged, mega = (
        layer.train(context_of(block_scaled=dist_moe.BlockScaledConfig(pipeline=pipeline)))
        for pipeline in ("staged", "mega")
    )
    assert_same(staged, mega)
    for name in ("y", "x", "w13", "w2"):
        assert 1e-3 < relative_error(staged[name], plain[name]) < 0.1, name


CALL_ERRORS = {
    "x of another width": (
        dict(x=torch.zeros(T, 64).bfloat16()),
        ValueError,
        r"x must be \[T, 256\]",
    ),
    "ids of another shape": (
        dict(ids=torch.zeros(T, 3, dtype=torch.int64)),
        ValueError,
        "ids must be",
    ),
    "x in FP32": (dict(x=torch.zeros(T, D)), TypeError, "x must be torch.bfloat16"),
    "ids in int16": (dict(ids=torch.zeros(T, K, dtype=torch.int16)), TypeError, "ids must be"),
    "scores in FP64": (dict(scores=torch.zeros(T, K).double()), TypeError, "scores must be"),
    "w13 in FP32": (dict(w13=torch.zeros(E, 2 * F, D)), TypeError, "w13 must be torch.bfloat16"),
    "three gates": (dict(w13=torch.zeros(E, 3, F, D).bfloat16()), ValueError, "2 in its second"),
    "mixed layouts": (dict(w13=torch.zeros(E * 2 * F, D).bfloat16()), ValueError, "both flattened"),
    "another expert": (dict(w2=torch.zeros(E + 1, D, F).bfloat16()), ValueError, "w2 must be"),
    "columns": (dict(x=torch.zeros(D, T).bfloat16().t()), ValueError, "x must be contiguous"),
    "columns of ids": (
        dict(ids=torch.zeros(K, T, dtype=torch.int64).t()),
        ValueError,
        "ids must be contiguous, got strides",
    ),
    "columns of scores": (dict(scores=torch.zeros(K, T).t()), ValueError, "scores must be contig"),
    "columns of w13": (
        dict(w13=torch.zeros(E, D, 2 * F).bfloat16().mT),
        ValueError,
        "w13 must be contiguous, got strides",
    ),
    "a weight of another device": (
        dict(w2=torch.zeros(E, D, F, device="meta").bfloat16()),
        ValueError,
        "all tensors must be on one device, got .*meta",
    ),
    "an id beyond": (dict(ids=torch.full((T, K), E)), ValueError, r"is 5; legal are 0 to 4"),
}


@pytest.mark.parametrize("name", CALL_ERRORS)
def test_wrong_arguments(layer, plain, name):
    changes, error, message = CALL_ERRORS[name]
    context = context_of()
    kept = dict(vars(layer))
    vars(layer).update(changes)
    with pytest.raises(error, match=message):
        layer.forward(context)
    vars(layer).update(kept)
    assert_same(layer.train(context), plain)


def test_options_are_frozen():
    options = dist_moe.ExecutionOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.inplace_wgrad_accum = True
