# SPDX-License-Identifier: Apache-2.0
"""Prepared weights, a norm's gamma and clip statistics: the bits of the core, in every way."""

import pytest
import torch

import distmoe
import distmoe.torch
from distmoe.torch import preparation
from distmoe.torch.eager import stream_of
from layer import BF16, Layer, make_config, nan_like, same_bits
from torch_model import expect_same_bits, open_context, train_config

CODED = dict(hidden_dim=64, intermediate_dim=32, num_experts=3)


def call(context, layer, **changes):
    given = dict(**layer.inputs(), **layer.local(context), context=context)
    return distmoe.torch.routed_experts(**{**given, **changes})


def prepare(layer, config):
    use = dict(format=config.precision, inference=config.inference)
    w13, w2 = (w.detach().requires_grad_(not config.inference) for w in (layer.w13, layer.w2))
    return dict(
        w13=distmoe.torch.prepare_block_scaled_weight(
            w13, **use, gate_up_layout=config.gate_up_layout
        ),
        w2=distmoe.torch.prepare_block_scaled_weight(w2, **use),
    )


def compiled(forward, backend):
    if backend is None:
        return forward
    torch._dynamo.reset()
    return torch.compile(forward, fullgraph=True, backend=backend)


def train(layer, forward, weights):
    """y and the gradients of x, the scores and two weights."""
    x, scores = (t.detach().requires_grad_() for t in (layer.x, layer.scores))
    y = forward(x, scores)
    y.backward(layer.dy)
    results = dict(y=y.detach(), x=x.grad, scores=scores.grad)
    for name, weight in weights.items():
        results[name], weight.grad = weight.grad, None
    return results


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_prepared_training_weights_have_the_bits_of_bf16_ones(layout):
    config = train_config(precision="mxfp8", gate_up_layout=layout, **CODED)
    with open_context(config) as context:
        layer = Layer(config)
        plain = dict(w13=layer.w13.requires_grad_(), w2=layer.w2.requires_grad_())
        prepared = prepare(layer, config)
        sources = {name: weight.source for name, weight in prepared.items()}

        def with_plain(x, scores):
            return call(context, layer, x=x, topk_scores=scores, **plain)

        def with_prepared(x, scores):
            return call(context, layer, x=x, topk_scores=scores, **prepared)

        expected = train(layer, with_plain, plain)
        expect_same_bits(train(layer, with_prepared, sources), expected)
        expect_same_bits(train(layer, compiled(with_prepared, "aot_eager"), sources), expected)
        for source in sources.values():  # nobody reads them
            source.data.fill_(float("nan"))
        expect_same_bits(train(layer, with_prepared, sources), expected)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4", "mxfp4"])
def test_prepared_inference_weights_have_the_bits_of_the_core(precision):
    config = make_config(precision=precision, inference=True, **CODED)
    with open_context(config) as context:
        layer = Layer(config)
        use = dict(format=precision, inference=True)
        expected = nan_like(layer.x)
        distmoe.routed_experts(
            context.core,
            **layer.inputs(),
            w13=distmoe.prepare_block_scaled_weight(layer.w13, **use),
            w2=distmoe.prepare_block_scaled_weight(layer.w2, **use),
            y=expected,
        )
        prepared = prepare(layer, config)
        assert same_bits(call(context, layer, **prepared), expected)
        places = [t.data_ptr() for t in prepared["w2"].tensors()]
        distmoe.torch.refill_prepared_weight(layer.w2 * 2, prepared["w2"])
        doubled = call(context, layer, **prepared)
        assert not same_bits(doubled, expected)
        distmoe.torch.refill_prepared_weight(layer.w2, prepared["w2"])
        assert [t.data_ptr() for t in prepared["w2"].tensors()] == places
        assert same_bits(call(context, layer, **prepared), expected)
        layer.w2[0, 3, 2] = float("nan")  # NaN scales, which calls take as they take NaN weights
        poisoned = call(context, layer, **prepare(layer, config))
        assert poisoned.isnan().any()


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4", "mxfp4"])
def test_preparing_is_an_operator(precision):
    weight = Layer(make_config(**CODED)).w13.requires_grad_()
    for is_inference in (True, False) if precision == "mxfp8" else (True,):
        use = (precision, is_inference, "interleaved")
        torch.library.opcheck(preparation.prepare_op, (weight.detach(), *use))
        made = preparation.prepare_op(weight.detach(), *use)
        doubled = (weight.detach() * 2, *use, *(torch.empty_like(t) for t in made))
        torch.library.opcheck(preparation.refill_op, doubled)

        def prepare(w):
            other = distmoe.torch.prepare_block_scaled_weight(
                w, precision, inference=is_inference, gate_up_layout="interleaved"
            )
            return other.tensors()

        for ours, theirs in zip(compiled(prepare, "aot_eager")(weight), made):
            assert same_bits(ours, theirs) and not ours.requires_grad


def test_in_place_gradients_of_prepared_weights():
    config = train_config(precision="mxfp8", **CODED)
    with open_context(config) as context:
        layer = Layer(config)
        prepared = prepare(layer, config)
        sources = [prepared["w2"].source, layer.w2.requires_grad_()]
        for source in sources:
            source.grad = torch.ones_like(source)
        place = sources[0].grad.data_ptr()
        for weights in (prepared, dict(w2=layer.w2)):
            y = call(context, layer, **weights, accumulate_wgrad=True)
            y.backward(layer.dy)
        assert sources[0].grad.data_ptr() == place
        assert same_bits(*(source.grad for source in sources))
        assert not same_bits(sources[0].grad, torch.ones_like(layer.w2))


def test_wrong_prepared_weights():
    config = make_config(precision="mxfp8", inference=True, **CODED)
    with open_context(config) as context:
        layer = Layer(config)
        good = prepare(layer, config)
        training = distmoe.torch.prepare_block_scaled_weight(layer.w13, "mxfp8")
        swapped = distmoe.torch.prepare_block_scaled_weight(
            layer.w13, "mxfp8", inference=True, gate_up_layout="interleaved"
        )
        for changes, error, words in (
            (dict(w2=layer.w2), TypeError, "w2 is Tensor; w13 and w2 must both be tensors, or"),
            (dict(w13=None), TypeError, "w13 is NoneType"),
            (dict(w13=training), ValueError, "for mxfp8 training; this context is for mxfp8 inf"),
            (dict(w13=swapped), ValueError, "prepared as interleaved; this context has concat"),
            (dict(w2=good["w13"]), ValueError, "prepared w2"),
        ):
            with pytest.raises(error, match=words):
                call(context, layer, **{**good, **changes})
        assert call(context, layer, **good).isfinite().all()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_gamma_has_the_bits_of_the_core(device, backend):
    with open_context(make_config(inference=True), device) as context:
        layer = Layer(context.config, device=device)
        gamma = torch.linspace(-1, 1, 32, device=device).to(BF16)
        norm = distmoe.PostExpertNorm(eps=1e-5, gamma=gamma, gain_center=1.0)

        def forward(x):
            return call(context, layer, x=x, norm=norm)

        run = (
            forward if backend is None else torch.compile(forward, fullgraph=True, backend=backend)
        )
        expected = nan_like(layer.x)
        given = dict(**layer.inputs(), **layer.local(context))
        distmoe.routed_experts(
            context.core, **given, y=expected, norm=norm, stream=stream_of(expected)
        )
        assert same_bits(run(layer.x), expected)
        gamma.requires_grad_()
        with pytest.raises(ValueError, match=r"norm.gamma require\(s\) grad"):
            forward(layer.x)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_clipped_elements_are_counted(device, needs_grad, backend):
    with open_context(device=device) as context:
        layer = Layer(context.config, device=device)
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        given = dict(**layer.inputs(), **layer.local(context))
        expected = nan_like(layer.x)
        options = dict(clip_counts=counts, clip_limit=0.5, stream=stream_of(expected))
        distmoe.routed_experts(context.core, **given, y=expected, **options)
        layer.x.requires_grad_(needs_grad)

        def forward(x):
            return call(context, layer, x=x, clip_limit=0.5)

        run = (
            forward if backend is None else torch.compile(forward, fullgraph=True, backend=backend)
        )
        y, ours = run(layer.x)
        assert same_bits(y, expected) and torch.equal(ours, counts)
        assert 0 < int(counts[0]) < int(counts[1]) < int(counts[2])
        assert y.requires_grad == needs_grad and not ours.requires_grad
        if needs_grad:
            y.backward(layer.dy)
            assert layer.x.grad.any()


def test_a_module_counts(device):
    with open_context(device=device) as context:
        module = distmoe.torch.RoutedExperts(context, clip_limit=0.25)
        layer = Layer(context.config, device=device)
        module(layer.x, layer.ids, layer.scores).backward(layer.dy)
        num_routes = int((layer.ids >= 0).sum())
        assert module.clip_counts[2] == num_routes * 24 and 0 < module.clip_counts[0]
        assert "clip_counts" not in module.state_dict()


def test_a_limit_that_is_none_of_a_number():
    with open_context() as context:
        with pytest.raises(ValueError, match="limit"):
            call(context, Layer(context.config), clip_limit=float("nan"))
