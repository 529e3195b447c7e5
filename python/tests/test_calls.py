# SPDX-License-Identifier: Apache-2.0
"""Calls compute what a plain loop does, with the same bits for every number of ranks and array."""

import numpy as np
import pytest
import torch

import distmoe
from layer import (
    GRADIENTS,
    Layer,
    make_config,
    nan_like,
    reference,
    relative_error,
    run_forward,
    run_training,
    same_bits,
)

# What rounding h1, h2, h3 and y to BF16 leaves, with room for the few values of these layers.
TOLERANCE = 0.01


@pytest.mark.parametrize("has_bias", [False, True])
def test_forward_and_gradients_are_those_of_a_plain_loop(has_bias):
    layer = Layer(make_config(), has_bias=has_bias)
    with distmoe.Context.create(layer.config) as context:
        results = run_training(context, layer)
    exact = Layer(make_config(), has_bias=has_bias)
    names = [name for name in GRADIENTS if getattr(exact, name) is not None]
    for name in names:
        setattr(exact, name, getattr(exact, name).double().requires_grad_())
    y = reference(exact)
    y.backward(exact.dy.double())
    assert relative_error(results["y"], y) < TOLERANCE
    for name in names:
        assert relative_error(results[name], getattr(exact, name).grad) < TOLERANCE, name
    assert results["scores"][2, 1] == 0  # of the disabled route


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_are_threads_give_the_bits_of_one(size):
    config = make_config()
    counts = [5, 0, 9][:size]
    alone, shared = {}, {}

    def body(communicator):
        rank = communicator.rank()
        with distmoe.Context.create(config, communicator, num_threads=1) as context:
            layer = Layer(config, num_tokens=counts[rank], seed=rank)
            shared[rank] = [run_training(context, layer) for _ in range(2)]

    distmoe.run_thread_group(size, body)
    with distmoe.Context.create(config, num_threads=1) as context:
        for rank in range(size):
            alone[rank] = run_forward(context, Layer(config, num_tokens=counts[rank], seed=rank))
    for rank in range(size):
        assert same_bits(shared[rank][0]["y"], alone[rank])
        for name, value in shared[rank][0].items():
            assert same_bits(value, shared[rank][1][name]), name


def test_forms_of_the_arguments_give_the_same_bits():
    layer = Layer(make_config())
    config = layer.config
    with distmoe.Context.create(config) as context:
        y = run_forward(context, layer)
        layer.ids = layer.ids.to(torch.int32)
        assert same_bits(run_forward(context, layer), y)
        wide = torch.empty(layer.num_tokens, 3 * config.hidden_dim, dtype=torch.bfloat16)
        wide[:, : config.hidden_dim] = layer.x
        layer.x = wide[:, : config.hidden_dim]
        assert same_bits(run_forward(context, layer), y)
        layer.w13 = layer.w13.view(
            config.num_experts, 2, config.intermediate_dim, config.hidden_dim
        )
        assert same_bits(run_forward(context, layer), y)
        layer.w13 = torch.nn.Parameter(layer.w13)
        assert same_bits(run_forward(context, layer), y)


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy().copy()


def test_numpy_arrays_give_the_same_bits():
    layer = Layer(make_config())
    bf16 = {name: as_numpy(getattr(layer, name)) for name in ("x", "w13", "w2")}
    bf16["x"].flags.writeable = False  # inputs may be read-only
    views = {name: distmoe.Reinterpreted(array, "bf16") for name, array in bf16.items()}
    y = np.zeros((layer.num_tokens, layer.config.hidden_dim), np.uint16)
    with distmoe.Context.create(layer.config) as context:
        distmoe.routed_experts(
            context,
            views["x"],
            layer.ids.numpy(),
            layer.scores.numpy(),
            views["w13"],
            views["w2"],
            distmoe.Reinterpreted(y, "bf16"),
        )
        expected = run_forward(context, layer)
        assert same_bits(torch.from_numpy(y).view(torch.bfloat16), expected)
        y.flags.writeable = False
        with pytest.raises(ValueError, match="y is written to, but .* is read-only"):
            distmoe.routed_experts(
                context,
                **layer.inputs(),
                **layer.local(context),
                y=distmoe.Reinterpreted(y, "bf16"),
            )


class OldArray:
    """An array of before DLPack 1: its __dlpack__ takes a stream alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_of_before_dlpack_1_give_the_same_bits():
    layer = Layer(make_config())
    with distmoe.Context.create(layer.config) as context:
        y = run_forward(context, layer)
        layer.ids, layer.scores = OldArray(layer.ids.numpy()), OldArray(layer.scores.numpy())
        assert same_bits(run_forward(context, layer), y)


def test_gradients_are_added_where_asked():
    layer = Layer(make_config(wgrad_dtype="fp32"))
    with distmoe.Context.create(layer.config) as context:
        fresh, added = {}, {}
        for results, accumulate in ((fresh, False), (added, ["w2"])):
            y = nan_like(layer.x)
            saved = distmoe.saving_routed_experts(
                context, **layer.inputs(), **layer.local(context), y=y
            )
            results.update(w13=torch.ones(layer.w13.shape), w2=torch.ones(layer.w2.shape))
            distmoe.routed_experts_backward(
                context,
                saved,
                layer.dy,
                layer.w13,
                layer.w2,
                grad_w13=results["w13"],
                grad_w2=results["w2"],
                accumulate=accumulate,
            )
        assert same_bits(added["w13"], fresh["w13"])
        assert same_bits(added["w2"], fresh["w2"] + 1)
        with pytest.raises(ValueError, match="accumulate names 'w3'; legal are w13, w2"):
            saved = distmoe.saving_routed_experts(
                context, **layer.inputs(), **layer.local(context), y=nan_like(layer.x)
            )
            distmoe.routed_experts_backward(
                context, saved, layer.dy, layer.w13, layer.w2, accumulate=["w3"]
            )
        assert saved.is_live


def test_a_norm_and_clip_counts_reach_the_call():
    layer = Layer(make_config())
    counts = torch.zeros(3, dtype=torch.int64)
    plain, normed = nan_like(layer.x), nan_like(layer.x)
    with distmoe.Context.create(layer.config) as context:
        weights = layer.local(context)
        distmoe.routed_experts(
            context, **layer.inputs(), **weights, y=plain, clip_counts=counts, clip_limit=0.5
        )
        norm = distmoe.PostExpertNorm(eps=1e-5)
        distmoe.routed_experts(context, **layer.inputs(), **weights, y=normed, norm=norm)
        with pytest.raises(ValueError, match="norm.eps is -1"):
            distmoe.routed_experts(
                context, **layer.inputs(), **weights, y=plain, norm=distmoe.PostExpertNorm(eps=-1.0)
            )
    routes = int((layer.ids >= 0).sum())
    assert counts[2] == routes * layer.config.intermediate_dim
    assert 0 < counts[0] < counts[1] < counts[2]  # gate > limit; |up| > limit
    assert not torch.equal(plain, normed) and normed.isfinite().all()
