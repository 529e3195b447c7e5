# SPDX-License-Identifier: Apache-2.0
"""What is wrong on one rank is raised on every rank at once, and the next call works."""

import numpy as np
import pytest
import torch

import distmoe
import distmoe.torch
from layer import Layer, make_config, nan_like, run_forward, run_training, same_bits
from lone_ranks import errors_of_ranks, expect_told
from torch_model import train_config

UNSUPPORTED, INVALID = distmoe.UnsupportedError, distmoe.InvalidArgumentError
BF16 = torch.bfloat16

ARGUMENTS = {
    "x of complex numbers": (
        dict(x=torch.zeros(11, 32, dtype=torch.complex64)),
        UNSUPPORTED,
        "x: no distmoe type for elements of complex64",
    ),
    "x in FP8": (
        dict(x=torch.zeros(11, 32).to(torch.float8_e4m3fn)),
        UNSUPPORTED,
        "x: no distmoe type for elements of float8_e4m3fn",
    ),
    "x in FP16": (dict(x=torch.zeros(11, 32).half()), INVALID, "x must be bf16, got f16 [11, 32]"),
    "ids of 8 bits": (
        dict(topk_ids=torch.zeros(11, 3, dtype=torch.int8)),
        UNSUPPORTED,
        "topk_ids: no distmoe type for elements of int8",
    ),
    "five dimensions": (dict(x=torch.zeros(1, 1, 1, 11, 32, dtype=BF16)), INVALID, "5 dimensions"),
    "a list of numbers": (dict(x=[1.0]), TypeError, "x is list; it must be"),
    "scores that are none": (dict(topk_scores=None), TypeError, "topk_scores is NoneType; it must"),
    "a number for a weight": (dict(w2=3), TypeError, "w2 is int; it must be"),
    "a bias that is a word": (dict(bias13="none"), TypeError, "bias13 is str; it must be"),
    "a norm without eps": (
        dict(norm=distmoe.PostExpertNorm(eps=0.0)),
        INVALID,
        "norm.eps is 0",
    ),
    "a norm that is none": (dict(norm=1e-6), TypeError, "norm is float; it must be"),
}
OF_TORCH_ALONE = {
    "a meta tensor": (
        dict(x=torch.zeros(11, 32, dtype=BF16, device="meta")),
        INVALID,
        "must be on one device, got cpu, meta",
    ),
    "a weight on meta": (
        dict(w13=torch.zeros(4, 48, 32, dtype=BF16, device="meta")),
        INVALID,
        "must be on one device, got cpu, meta",
    ),
    "a sparse x": (
        dict(x=torch.eye(11, 32).to_sparse()),
        INVALID,
        "x is a torch.sparse_coo tensor; the tensors of a call must be torch.strided",
    ),
    "nested scores": (
        dict(topk_scores=torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)])),
        INVALID,
        "topk_scores is a nested tensor; the tensors of a call must be",
    ),
    "a clip limit that is a word": (dict(clip_limit="7"), TypeError, "clip_limit is str; it must"),
    "no answer to a question": (
        dict(accumulate_wgrad="yes"),
        TypeError,
        "accumulate_wgrad is str; it must be a bool",
    ),
}


OF_THE_CORE_ALONE = {
    "a sparse x": (
        dict(x=torch.eye(11, 32).to_sparse()),
        INVALID,
        "x is torch.Tensor of layout torch.sparse_coo, which DLPack does not export",
    ),
    "strings": (
        dict(topk_ids=np.array([["a"] * 3] * 11)),
        UNSUPPORTED,
        "topk_ids: no distmoe type for elements of <U1",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS | OF_THE_CORE_ALONE)
def test_arguments_of_the_core(case):
    changes, kind, words = (ARGUMENTS | OF_THE_CORE_ALONE)[case]
    config = make_config()

    def body(communicator, is_wrong, attempt):
        layer = Layer(config, seed=communicator.rank())
        with distmoe.Context.create(config, communicator) as context:
            y = nan_like(layer.x)
            given = dict(**layer.inputs(), **layer.local(context), y=y)
            attempt(
                lambda: distmoe.routed_experts(context, **given | (changes if is_wrong else {}))
            )
            assert y.isnan().all()
            assert run_forward(context, layer).isfinite().all()

    expect_told(errors_of_ranks(body), kind, words)


@pytest.mark.parametrize("name", ["x", "topk_scores", "w13", "w2", "bias2"])
def test_an_output_over_an_input(name):
    config = make_config()

    def body(communicator, is_wrong, attempt):
        layer = Layer(config, seed=communicator.rank(), has_bias=True)
        with distmoe.Context.create(config, communicator) as context:
            given = dict(**layer.inputs(), **layer.local(context))
            y = nan_like(layer.x)
            if is_wrong:  # the memory of both, with y from its second row on
                rows = max(given[name].untyped_storage().nbytes() // 64 + 1, 12)
                memory = torch.zeros(rows * 64, dtype=torch.uint8)
                both = memory.view(given[name].dtype)[: given[name].numel()]
                y = memory.view(BF16)[32 : 32 * 12].view(11, 32)
                given[name] = both.copy_(given[name].flatten()).view(given[name].shape)
            before = given[name].clone()
            attempt(lambda: distmoe.routed_experts(context, **given, y=y))
            assert same_bits(given[name], before)
            assert run_forward(context, layer).isfinite().all()

    expect_told(errors_of_ranks(body), INVALID, f"y and {name} overlap in memory: bytes [0x")


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (dict(config=None), TypeError, "config is None; it must be a Config"),
        (dict(backend="tpu"), INVALID, "backend is 'tpu'; legal is one of cpu, cuda"),
    ],
)
def test_what_a_context_is_made_of(changes, kind, words):
    config = make_config()

    def body(communicator, is_wrong, attempt):
        given = dict(config=config, communicator=communicator)
        wrong = given | (changes if is_wrong else {})
        attempt(lambda: distmoe.Context.create(**wrong))
        layer = Layer(config, seed=communicator.rank())
        with distmoe.Context.create(**given) as context:
            assert run_forward(context, layer).isfinite().all()

    expect_told(errors_of_ranks(body), kind, words)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("case", ARGUMENTS | OF_TORCH_ALONE)
def test_arguments_of_the_operator(case, needs_grad):
    changes, kind, words = (ARGUMENTS | OF_TORCH_ALONE)[case]

    def body(communicator, is_wrong, attempt):
        with distmoe.torch.create_context(train_config(), communicator, device="cpu") as context:
            layer = Layer(context.config, seed=communicator.rank())
            given = dict(**layer.inputs(), **layer.local(context), context=context)
            given["w2"].requires_grad_(needs_grad)
            wrong = given | (changes if is_wrong else {})
            attempt(lambda: distmoe.torch.routed_experts(**wrong))
            y = distmoe.torch.routed_experts(**given)
            if needs_grad:
                y.backward(layer.dy)
                assert given["w2"].grad is not None or given["w2"].grad_fn is not None

    expect_told(errors_of_ranks(body), kind, words)


def test_gradients_under_an_inference_context():
    def body(communicator, is_wrong, attempt):
        config = make_config(inference=True)
        with distmoe.torch.create_context(config, communicator, device="cpu") as context:
            layer = Layer(config, seed=communicator.rank())
            given = dict(**layer.inputs(), **layer.local(context), context=context)
            layer.scores.requires_grad_(is_wrong)
            attempt(lambda: distmoe.torch.routed_experts(**given))
            with torch.no_grad():
                assert distmoe.torch.routed_experts(**given).isfinite().all()

    expect_told(errors_of_ranks(body), INVALID, "topk_scores require(s) grad, but the context is")


def test_inputs_of_a_module():
    def body(communicator, is_wrong, attempt):
        with distmoe.torch.create_context(train_config(), communicator, device="cpu") as context:
            module = distmoe.torch.RoutedExperts(context)
            layer = Layer(context.config, seed=communicator.rank())
            x = None if is_wrong else layer.x
            attempt(lambda: module(x, layer.ids, layer.scores))
            with torch.no_grad():
                assert module(layer.x, layer.ids, layer.scores).isfinite().all()

    expect_told(errors_of_ranks(body), TypeError, "x is NoneType; it must be a torch.Tensor")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(saved=None), "saved is NoneType; it must be the SavedForward"),
        (dict(dy=[1.0]), "dy is list; it must be a tensor"),
        (dict(accumulate=3), "not iterable"),
    ],
)
def test_arguments_of_a_backward_of_the_core(changes, words):
    config = make_config(activation_slot_capacity_factor=1.0)

    def body(communicator, is_wrong, attempt):
        layer = Layer(config, seed=communicator.rank())
        with distmoe.Context.create(config, communicator) as context:
            weights, y = layer.local(context), nan_like(layer.x)
            saved = distmoe.saving_routed_experts(context, **layer.inputs(), **weights, y=y)
            given = dict(saved=saved, dy=layer.dy, **weights)
            wrong = given | (changes if is_wrong else {})
            attempt(lambda: distmoe.routed_experts_backward(context, **wrong))
            assert saved.is_live  # on every rank: the backward may come again
            distmoe.routed_experts_backward(context, **given)
            assert run_training(context, layer)["y"].isfinite().all()

    expect_told(errors_of_ranks(body), TypeError, words)


def test_a_backward_that_cannot_add_to_a_gradient():
    def body(communicator, is_wrong, attempt):
        with distmoe.torch.create_context(train_config(), communicator, device="cpu") as context:
            module = distmoe.torch.RoutedExperts(context, accumulate_wgrad=True)
            layer = Layer(context.config, seed=communicator.rank())
            y = module(layer.x, layer.ids, layer.scores)
            if is_wrong:
                module.w2.grad = torch.zeros(module.w2.mT.shape, dtype=BF16).mT
            attempt(y.backward, layer.dy)
            del y
            context.reset()  # the schedule was aborted, on every rank
            module.w2.grad = None
            module(layer.x, layer.ids, layer.scores).backward(layer.dy)
            assert module.w2.grad.isfinite().all()

    expect_told(errors_of_ranks(body), INVALID, "the gradient of w2 must be contiguous")


def test_a_second_backward_through_one_graph():
    def body(communicator, is_wrong, attempt):
        with distmoe.torch.create_context(train_config(), communicator, device="cpu") as context:
            layer = Layer(context.config, seed=communicator.rank())
            layer.w13.requires_grad_()
            given = dict(**layer.inputs(), **layer.local(context), context=context)
            first = distmoe.torch.routed_experts(**given)
            first.backward(layer.dy, retain_graph=True)
            second = distmoe.torch.routed_experts(**given)
            attempt((first if is_wrong else second).backward, layer.dy)
            del first, second
            context.reset()
            distmoe.torch.routed_experts(**given).backward(layer.dy)

    expect_told(errors_of_ranks(body), INVALID, "had its backward already")


def test_a_rank_that_was_closed_says_so_and_three_agree():
    def body(communicator, is_wrong, attempt):
        config = make_config()
        layer = Layer(config, seed=communicator.rank())
        with distmoe.Context.create(config, communicator) as context:
            distmoe.agree(context)
            failure = KeyError("gain") if is_wrong else None
            attempt(lambda: distmoe.agree(context, failure))
            assert run_forward(context, layer).isfinite().all()
        with pytest.raises(distmoe.ClosedError):
            distmoe.agree(context)
        with pytest.raises(distmoe.ClosedError):
            distmoe.refuse_routed_experts(context, ValueError("late"))

    errors = errors_of_ranks(body, size=3)
    expect_told(errors, distmoe.InternalError, "KeyError: 'gain'")


def test_a_refusal_needs_no_call():
    def body(communicator, is_wrong, attempt):
        config = make_config()
        layer = Layer(config, seed=communicator.rank())
        with distmoe.Context.create(config, communicator) as context:

            def call():
                if is_wrong:
                    distmoe.refuse_routed_experts(context, ValueError("no batch is left"))
                run_forward(context, layer)

            attempt(call)
            assert run_forward(context, layer).isfinite().all()

    expect_told(errors_of_ranks(body), INVALID, "ValueError: no batch is left")
