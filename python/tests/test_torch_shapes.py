# SPDX-License-Identifier: Apache-2.0
"""Traces and shapes alone refuse what a real call refuses, in its words, and meet no peer."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import distmoe
import distmoe.torch
from layer import BF16, Layer, make_config
from torch_model import open_context

CASES = {
    "x in FP32": dict(x=torch.zeros(11, 32)),
    "x of complex numbers": dict(x=torch.zeros(11, 32, dtype=torch.complex64)),
    "a width of another model": dict(x=torch.zeros(11, 31, dtype=BF16)),
    "too many tokens": dict(x=torch.zeros(17, 32, dtype=BF16)),
    "columns of x": dict(x=torch.zeros(32, 11, dtype=BF16).t()),
    "three dimensions": dict(x=torch.zeros(1, 11, 32, dtype=BF16)),
    "ids of other tokens": dict(topk_ids=torch.zeros(10, 3, dtype=torch.int64)),
    "ids in FP32": dict(topk_ids=torch.zeros(11, 3)),
    "ids of 8 bits": dict(topk_ids=torch.zeros(11, 3, dtype=torch.int8)),
    "scores of another K": dict(topk_scores=torch.zeros(11, 2)),
    "scores in FP16": dict(topk_scores=torch.zeros(11, 3).half()),
    "another expert's weights": dict(w13=torch.zeros(6, 48, 32, dtype=BF16)),
    "w2 in FP32": dict(w2=torch.zeros(7, 32, 24)),
    "w2 by columns": dict(w2=torch.zeros(7, 24, 32, dtype=BF16).mT),
    "a bias of another width": dict(bias13=torch.zeros(7, 47)),
    "a norm's gamma in training": dict(
        norm=distmoe.PostExpertNorm(gamma=torch.ones(32, dtype=BF16))
    ),
    "a clip limit that is none": dict(clip_limit=float("nan")),
}
# A strided tensor keeps its strides on the way to meta and to fake ones.


def arguments(context, changes=None):
    layer = Layer(context.config)
    given = dict(**layer.inputs(), **layer.local(context), context=context)
    return given | (changes or {})


def error_of(call, given):
    with pytest.raises((distmoe.Error, TypeError)) as raised:
        call(**given)
    return raised.value


def moved(given, move):
    def one(value):
        if isinstance(value, distmoe.PostExpertNorm):
            return distmoe.PostExpertNorm(gamma=move(value.gamma))
        return move(value) if isinstance(value, torch.Tensor) else value

    return {name: one(value) for name, value in given.items()}


def expect_the_error(error, expected):
    """Real calls say their rank and number too, and how DLPack has it."""
    words = str(expected).removeprefix("rank 0, call 1: ")
    assert (type(error), str(error)) == (type(expected), words)


@pytest.mark.parametrize("case", CASES)
def test_fake_and_meta_tensors_are_refused_as_real_ones(case):
    with open_context() as context:
        given = arguments(context, CASES[case])
        with FakeTensorMode() as mode:
            fake = error_of(distmoe.torch.routed_experts, moved(given, mode.from_tensor))
        meta = error_of(distmoe.torch.routed_experts, moved(given, lambda t: t.to("meta")))
        real = error_of(distmoe.torch.routed_experts, given)
        expect_the_error(fake, real)
        expect_the_error(meta, real)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("case", ["x in FP32", "ids of other tokens", "w2 in FP32"])
def test_a_compiler_finds_them(case, needs_grad):
    with open_context() as context:
        given = arguments(context, CASES[case])
        given["w13"].requires_grad_(needs_grad)
        words = str(error_of(distmoe.torch.routed_experts, given)).split(": ", 1)[1]
        torch._dynamo.reset()
        compiled = torch.compile(distmoe.torch.routed_experts, fullgraph=True, backend="aot_eager")
        calls = context.core.num_begun_calls
        with pytest.raises(Exception) as raised:
            compiled(**given)
        assert words in str(raised.value)
        assert context.core.num_begun_calls == calls  # refused while it was traced


def test_types_are_checked_while_a_compiler_traces():
    with open_context() as context:
        torch._dynamo.reset()
        compiled = torch.compile(distmoe.torch.routed_experts, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="w2 is int; it must be"):
            compiled(**arguments(context, dict(w2=3)))


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_traces_of_legal_shapes_check_and_call_nothing(tracing_mode):
    with open_context() as context:
        given = arguments(context)
        calls = context.core.num_begun_calls

        def forward(x, ids, scores):
            return distmoe.torch.routed_experts(x, ids, scores, given["w13"], given["w2"], context)

        inputs = (given["x"], given["topk_ids"], given["topk_scores"])
        graph = make_fx(forward, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*inputs)
        assert context.core.num_begun_calls == calls
        assert torch.equal(graph(*inputs), forward(*inputs))


def test_shapes_need_an_open_context():
    with open_context() as context:
        given = arguments(context)
    with FakeTensorMode() as mode:
        error = error_of(distmoe.torch.routed_experts, moved(given, mode.from_tensor))
        assert isinstance(error, distmoe.ClosedError)


def test_prepared_weights_are_checked_by_shape_too():
    config = make_config(hidden_dim=64, intermediate_dim=32, precision="mxfp8", inference=True)
    with open_context(config) as context:
        given = arguments(context)
        for name in ("w13", "w2"):
            given[name] = distmoe.torch.prepare_block_scaled_weight(
                given[name], "mxfp8", inference=True
            )
        given["w2"].codes = given["w2"].codes[:, :32].contiguous()
        real = error_of(distmoe.torch.routed_experts, given)
        with FakeTensorMode() as mode:
            inputs = moved(given, mode.from_tensor)
            for name in ("w13", "w2"):
                weight = given[name]
                inputs[name] = distmoe.torch.PreparedWeight(
                    mode.from_tensor(weight.source),
                    "mxfp8",
                    mode.from_tensor(weight.codes),
                    mode.from_tensor(weight.scales),
                    inference=True,
                )
            expect_the_error(error_of(distmoe.torch.routed_experts, inputs), real)


@pytest.mark.parametrize(
    ("weight", "use"),
    [
        (torch.zeros(2, 64, 64), ("mxfp8", False, "concatenated")),
        (torch.zeros(2, 64, 64, dtype=BF16).mT, ("mxfp8", False, "concatenated")),
        (torch.zeros(2, 64, 48, dtype=BF16), ("mxfp8", False, "concatenated")),
        (torch.zeros(2, 40, 64, dtype=BF16), ("mxfp8", False, "concatenated")),
        (torch.zeros(2, 64, 64, dtype=BF16), ("fp8", False, "concatenated")),
        (torch.zeros(2, 64, 64, dtype=BF16), ("nvfp4", False, "concatenated")),
        (torch.zeros(2, 64, 64, dtype=BF16), ("mxfp8", False, "alternating")),
        (torch.zeros(2, 2, 32, 64, dtype=BF16), ("mxfp8", False, "interleaved")),
    ],
)
def test_weights_to_prepare_are_checked_by_shape_too(weight, use):
    operator = torch.ops.distmoe.prepare_block_scaled_weight
    with pytest.raises(distmoe.InvalidArgumentError) as real:
        operator(weight, *use)
    with FakeTensorMode() as mode:
        with pytest.raises(distmoe.InvalidArgumentError) as fake:
            operator(mode.from_tensor(weight), *use)
    assert str(fake.value) == str(real.value)


def test_memory_to_refill_is_checked_by_shape_too():
    weight = torch.zeros(2, 64, 64, dtype=BF16)
    prepared = distmoe.torch.prepare_block_scaled_weight(weight, "mxfp8")
    codes = prepared.codes[:1].contiguous()
    with FakeTensorMode() as mode:
        places = (mode.from_tensor(codes), mode.from_tensor(prepared.scales), torch.empty(0))
        with pytest.raises(ValueError, match=r"codes of out must be uint8 \[2, 64, 64\], got"):
            torch.ops.distmoe.refill_prepared_weight(
                mode.from_tensor(weight), "mxfp8", False, "concatenated", *places
            )


def test_only_tensors_are_prepared():
    with pytest.raises(TypeError, match="weight is list; it must be a torch.Tensor"):
        distmoe.torch.prepare_block_scaled_weight([1.0], "mxfp8")
    with pytest.raises(TypeError, match="out is Tensor; it must be a distmoe.torch.weights"):
        distmoe.torch.refill_prepared_weight(torch.zeros(1), torch.zeros(1))


def test_a_shape_is_no_tensor_of_a_call():
    with open_context() as context:
        given = arguments(context)
        given.pop("context")
        y = torch.empty_like(given["x"])
        given["x"] = distmoe.TensorShape("bf16", [11, 32], [32, 1])
        distmoe.check_routed_experts(context.core, **given, y=y)
        with pytest.raises(ValueError, match="x has a null data pointer"):
            distmoe.routed_experts(context.core, **given, y=y)


@pytest.mark.parametrize(
    ("shape", "strides", "words"),
    [
        ([], [], "a tensor has 0 dimensions; 1 to 4 are supported"),
        ([1] * 5, [1] * 5, "a tensor has 5 dimensions; 1 to 4 are supported"),
        ([2, -1], [1, 1], "a tensor has extent -1 in dimension 1"),
        ([2**62, 4], [4, 1], "64 bits"),
        ([2, 3], [1], "a tensor of 2 dimensions was given 1 strides"),
        ([2], [1, 1], "a tensor of 1 dimensions was given 2 strides"),
    ],
)
def test_shapes_that_no_tensor_has(shape, strides, words):
    with pytest.raises(distmoe.InvalidArgumentError, match=words):
        distmoe.TensorShape("bf16", shape, strides)
