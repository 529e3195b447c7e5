# SPDX-License-Identifier: Apache-2.0
"""A program of the caller that raises on one rank.

Its exception is raised there, an error on the peers in the same call, and contexts go on.
"""

import gc

import pytest
import torch

from dist_moe_layer import D, E, F, Layer, config, norm_options
from distmoe import InvalidArgumentError, dist_moe
from lone_ranks import errors_of_ranks, expect_told

CONFIG = config(num_experts=4, device_scratch_capacity_factor=2.0)


class Boom(Exception):
    pass


def raising_at(call: int, is_wrong: bool, answer):
    """A program that raises in its `call`th run of this rank, where the rank is the wrong one."""
    runs = []

    def program(*arguments):
        runs.append(None)
        if is_wrong and len(runs) == call:
            raise Boom("out of luck")
        return answer(*arguments)

    return program


def own_layer(context):
    """With the weights of this rank's experts alone."""
    layer = Layer()
    first = context.inner.first_expert
    own = slice(first, first + context.inner.num_local_experts)
    for name in ("w13", "w2"):
        setattr(layer, name, getattr(layer, name).detach()[own].clone().requires_grad_())
    return layer


def first_argument(value, *_):
    return value


def destination(name, shape, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device), False


def make_options(name, call, is_wrong):
    answer = dict(
        wgrad_postprocess_fn=lambda name, gradient: gradient, wgrad_destination_fn=destination
    ).get(name, first_argument)
    program = raising_at(call, is_wrong, answer)
    if name.startswith("observe"):
        return norm_options(**{name: program})
    return dist_moe.ExecutionOptions(**{name: program})


CASES = [
    # Program, the run in which it raises, whether that is in the backward.
    ("weights_preprocess_fn", 1, False),
    ("weights_preprocess_fn", 4, True),
    ("experts_output_postprocess", 1, False),
    ("experts_output_postprocess", 2, True),
    ("observe_expert_output_fn", 1, False),
    ("observe_expert_output_grad_fn", 1, True),
    ("wgrad_postprocess_fn", 2, True),
    ("wgrad_destination_fn", 1, True),
]


@pytest.mark.parametrize(("name", "call", "is_in_backward"), CASES)
def test_a_program_that_raises_on_one_rank(name, call, is_in_backward):
    def body(communicator, is_wrong, attempt):
        context = dist_moe.create_context(group=communicator, config=CONFIG, device="cpu")
        layer = own_layer(context)
        layer.ids = layer.ids.clamp(max=3)
        options = make_options(name, call, is_wrong)
        if not is_in_backward:
            attempt(lambda: layer.forward(context, options))
        else:
            y = layer.forward(context, options)
            attempt(y.backward, layer.dy)
            del y
            gc.collect()
            context.reset()  # the step was aborted, on every rank
        results = layer.train(context, make_options(name, 0, is_wrong))
        assert results["y"].isfinite().all() and results["x"].isfinite().all()
        context.close()

    expect_told(errors_of_ranks(body), Boom, "out of luck")


ANSWERS = [
    # Program, a result of a kind that it may not have, whether that is met in the backward.
    ("weights_preprocess_fn", [1.0], False, TypeError, "must return a tensor for w13, got list"),
    (
        "weights_preprocess_fn",
        torch.zeros(4, 2 * F, D, device="meta"),
        False,
        ValueError,
        "must stay on cpu for w13, got meta",
    ),
    ("weights_preprocess_fn", torch.zeros(3), False, TypeError, "w13 must be torch.bfloat16"),
    ("wgrad_postprocess_fn", 1.0, True, TypeError, "a tensor or None for w2, got float"),
    (
        "wgrad_postprocess_fn",
        torch.zeros(3),
        True,
        ValueError,
        f"must return [2, {D}, {F}] on cpu for w2, got [3] on cpu",
    ),
    (
        "wgrad_postprocess_fn",
        torch.zeros(2, D, F, dtype=torch.int64),
        True,
        TypeError,
        "must return floats for w2, got torch.int64",
    ),
]


@pytest.mark.parametrize(("name", "answer", "is_in_backward", "kind", "words"), ANSWERS)
def test_results_of_a_wrong_kind(name, answer, is_in_backward, kind, words):
    def body(communicator, is_wrong, attempt):
        context = dist_moe.create_context(group=communicator, config=CONFIG, device="cpu")
        layer = own_layer(context)
        layer.ids = layer.ids.clamp(max=3)
        options = make_options(name, 0, False)
        if is_wrong:
            options = dist_moe.ExecutionOptions(**{name: lambda *_: answer})
        if not is_in_backward:
            attempt(lambda: layer.forward(context, options))
        else:
            y = layer.forward(context, options)
            attempt(y.backward, layer.dy)
            del y
            gc.collect()
            context.reset()
        assert layer.train(context)["w13"].isfinite().all()
        context.close()

    expect_told(errors_of_ranks(body), kind, words)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (dict(x=[1.0]), TypeError, "x is list; it must be a torch.Tensor"),
        (dict(w13=None), TypeError, "w13 is NoneType; it must be a torch.Tensor or"),
        (dict(x=torch.eye(6, D).to_sparse()), InvalidArgumentError, "x is a torch.sparse_coo"),
        (dict(ids=torch.zeros(6, 2)), TypeError, "ids must be torch.int32 or torch.int64"),
        (dict(scores=torch.zeros(6, 3)), ValueError, "scores must be [6, 2], got [6, 3]"),
    ],
)
def test_arguments_of_one_rank(changes, kind, words):
    def body(communicator, is_wrong, attempt):
        context = dist_moe.create_context(group=communicator, config=CONFIG, device="cpu")
        layer = own_layer(context)
        layer.ids = layer.ids.clamp(max=3)
        given = dict(x=layer.x, ids=layer.ids, scores=layer.scores, w13=layer.w13, w2=layer.w2)
        wrong = given | (changes if is_wrong else {})
        attempt(lambda: dist_moe.routed_experts(*wrong.values(), context))
        assert dist_moe.routed_experts(*given.values(), context).isfinite().all()
        context.close()

    expect_told(errors_of_ranks(body), kind, words)


def test_options_and_contexts_of_another_type():
    layer = Layer()
    arguments = (layer.x, layer.ids, layer.scores, layer.w13, layer.w2)
    context = dist_moe.create_context(group=None, config=config(), device="cpu")
    with pytest.raises(TypeError, match="options is dict; it must be a .*ExecutionOptions"):
        dist_moe.routed_experts(*arguments, context, options={})
    with pytest.raises(TypeError, match="context is .*; it must be a distmoe.dist_moe"):
        dist_moe.routed_experts(*arguments, context.inner)
    with pytest.raises(TypeError, match="config is NoneType; it must be a distmoe.dist_moe"):
        dist_moe.create_context(group=None, config=None, device="cpu")
    with pytest.raises(TypeError, match="group is int; it must be a torch.*Communicator or None"):
        dist_moe.create_context(group=3, config=config(), device="cpu")
    assert (layer.w13.shape, layer.w2.shape) == ((E, 2 * F, D), (E, D, F))
