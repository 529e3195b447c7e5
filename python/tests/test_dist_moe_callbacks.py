# SPDX-License-Identifier: Apache-2.0
"""The caller's programs in a call of dist_moe.

The plain call is the oracle: a program that changes nothing changes no bit.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dist_moe_layer import D, E, F, K, Layer, T, assert_same, context_of, norm_options
from distmoe import dist_moe
from layer import relative_error, same_bits


@pytest.fixture
def layer():
    return Layer()


@pytest.fixture
def plain(layer):
    return layer.train(context_of())


@pytest.mark.parametrize("name", ["preprocess", "postprocess", "wgrad"])
def test_programs_that_change_nothing_change_no_bit(name, device):
    layer, calls = Layer(device=device), []
    plain = layer.train(context_of(device))

    def same(value):
        calls.append(tuple(value.shape))
        return value * 1

    def same_gradient(weight_name, gradient):
        calls.append(weight_name)
        return gradient

    options, expected_calls = {
        "preprocess": (
            dict(weights_preprocess_fn=same),
            [(E, 2 * F, D), (E, D, F)] * 2,
        ),
        "postprocess": (dict(experts_output_postprocess=same), [(T * K, D)] * 2),
        "wgrad": (dict(wgrad_postprocess_fn=same_gradient), ["w2", "w13"]),
    }[name]
    options = dist_moe.ExecutionOptions(**options)
    assert options.requires_eager
    context = context_of(device, activation_slot_capacity_factor=1.0)
    results = layer.train(context, options)
    if name == "postprocess":  # PyTorch sums the gradient of a score, in an order of its own
        ours, theirs = results.pop("scores"), plain["scores"]
        assert relative_error(ours, theirs) < 1e-6 and ours[1, 1] == 0
        results["scores"] = theirs
    assert_same(results, plain)
    assert calls == expected_calls
    with torch.no_grad():
        assert same_bits(layer.forward(context, options), plain["y"])


def test_a_postprocess_trains_its_own_parameters(layer):
    gain = torch.nn.Parameter(torch.linspace(0.5, 1.5, D))
    seen = []

    def scale(rows):
        seen.append(rows.detach().clone())
        return rows.float() * gain

    options = dist_moe.ExecutionOptions(experts_output_postprocess=scale)
    results = layer.train(context_of(), options)
    scores = layer.scores.detach().nan_to_num(0.0)
    rows = seen[0].double().view(T, K, D)
    assert not rows[1, 1].any()  # of the disabled route
    expected = (rows * gain.detach() * scores.unsqueeze(-1)).sum(1)
    assert relative_error(results["y"], expected) < 3e-3
    of_gain = (rows * scores.unsqueeze(-1) * layer.dy.double().unsqueeze(1)).sum((0, 1))
    assert relative_error(gain.grad, of_gain) < 1e-5
    of_scores = (rows * gain.detach() * layer.dy.double().unsqueeze(1)).sum(-1)
    assert relative_error(results["scores"], of_scores) < 1e-5
    assert len(seen) == 2 and same_bits(seen[0], seen[1])


def test_consumed_gradients_are_not_returned(layer, plain):
    kept = {}
    options = dist_moe.ExecutionOptions(wgrad_postprocess_fn=kept.__setitem__)
    results = layer.train(context_of(), options)
    assert results.pop("w13") is None and results.pop("w2") is None
    assert_same({**results, **kept}, plain)


@pytest.mark.parametrize("is_added", [False, True])
def test_destinations_take_gradients(layer, plain, is_added):
    places = {name: torch.full_like(plain[name], 0.5) for name in ("w13", "w2")}
    before = {name: place.clone() for name, place in places.items()}

    def destination(name, shape, dtype, device):
        assert (shape, dtype, device.type) == (plain[name].shape, torch.bfloat16, "cpu")
        return places[name], is_added

    options = dist_moe.ExecutionOptions(wgrad_destination_fn=destination)
    results = layer.train(context_of(), options)
    assert results["w13"] is None and results["w2"] is None
    for name, place in places.items():
        if not is_added:
            assert same_bits(place, plain[name])
            continue
        exact = before[name].double() + plain[name].double()
        assert relative_error(place, exact) < 3e-3 and not same_bits(place, before[name])


@pytest.mark.parametrize("has_owners", [False, True])
def test_accumulation_keeps_storage_and_runs_hooks_once(layer, plain, has_owners):
    runs = []
    for name in ("w13", "w2"):
        getattr(layer, name).register_post_accumulate_grad_hook(lambda _, n=name: runs.append(n))
    owners = (layer.w13, layer.w2) if has_owners else None
    options = dist_moe.ExecutionOptions(inplace_wgrad_accum=True, wgrad_parameter_owners=owners)
    assert not options.requires_eager
    context = context_of()
    layer.forward(context, options).backward(layer.dy)
    assert same_bits(layer.w13.grad, plain["w13"]) and sorted(runs) == ["w13", "w2"]
    addresses = [layer.w13.grad.data_ptr(), layer.w2.grad.data_ptr()]
    layer.forward(context, options).backward(layer.dy)
    assert [layer.w13.grad.data_ptr(), layer.w2.grad.data_ptr()] == addresses
    assert sorted(runs) == ["w13", "w13", "w2", "w2"]
    for name in ("w13", "w2"):
        assert relative_error(getattr(layer, name).grad, 2 * plain[name].double()) < 3e-3


def test_observers_read_along(layer):
    plain = layer.train(context_of(), norm_options())
    seen = []
    observed = norm_options(
        observe_expert_output_fn=lambda rows: seen.append(rows),
        observe_expert_output_grad_fn=lambda rows, grad: seen.append((rows, grad)),
    )
    assert observed.requires_eager and not norm_options().requires_eager
    assert_same(layer.train(context_of(), observed), plain)
    rows, (again, gradient) = seen
    assert same_bits(rows, again) and rows.shape == (T * K, D)
    exact = rows.double().view(T, K, D).requires_grad_()
    scores = layer.scores.detach().double().nan_to_num(0.0).unsqueeze(-1)
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
    y = (normed * scores).sum(1)
    y.backward(layer.dy.double())
    assert relative_error(plain["y"], y) < 3e-3
    is_on = (layer.ids >= 0).reshape(-1)
    assert relative_error(gradient[is_on], exact.grad.view(T * K, D)[is_on]) < 3e-3


def test_callbacks_need_eager_mode(layer):
    context = context_of()
    options = dist_moe.ExecutionOptions(experts_output_postprocess=lambda rows: rows)
    arguments = (layer.ids, layer.scores, layer.w13, layer.w2, context)
    with pytest.raises(RuntimeError, match="require eager mode"):
        make_fx(lambda x: dist_moe.routed_experts(x, *arguments, options=options))(layer.x)


CALLBACK_ERRORS = {
    "no tensor": (lambda rows: None, TypeError, "must return a tensor"),
    "another shape": (lambda rows: rows[:, :4].contiguous(), ValueError, "preserve route shape"),
    "columns": (lambda rows: rows.t().contiguous().t(), ValueError, "contiguous"),
    "FP64": (lambda rows: rows.double(), TypeError, "float16, bfloat16, or float32"),
}


@pytest.mark.parametrize("name", CALLBACK_ERRORS)
def test_wrong_answers_of_a_postprocess(layer, name):
    callback, error, message = CALLBACK_ERRORS[name]
    options = dist_moe.ExecutionOptions(experts_output_postprocess=callback)
    with torch.no_grad(), pytest.raises(error, match=message):
        layer.forward(context_of(), options)


def test_wrong_destinations(layer):
    for answer, error, message in (
        (None, TypeError, r"must return \(tensor, accumulate\)"),
        ((torch.zeros(3), False), RuntimeError, "requested shape"),
    ):
        options = dist_moe.ExecutionOptions(wgrad_destination_fn=lambda *_, a=answer: a)
        context = context_of()
        y = layer.forward(context, options)
        with pytest.raises(error, match=message):
            y.backward(layer.dy)
