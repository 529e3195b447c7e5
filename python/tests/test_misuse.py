# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: the class of the exception, the values in its words, and what works after."""

import ctypes

import pytest
import torch

import distmoe
from layer import Layer, make_config, nan_like, run_forward


class OfAGpu:
    """A tensor that says that it lies on the second GPU, in DLPack's words."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (2, 1)

    def __dlpack__(self, stream=None):
        capsule = self.tensor.__dlpack__()
        address_of = ctypes.pythonapi.PyCapsule_GetPointer
        address_of.restype, address_of.argtypes = (
            ctypes.c_void_p,
            [ctypes.py_object, ctypes.c_char_p],
        )
        device = ctypes.cast(address_of(capsule, b"dltensor") + 8, ctypes.POINTER(ctypes.c_int32))
        device[0], device[1] = self.__dlpack_device__()
        return capsule


CASES = {
    "x of another type": (
        dict(x=torch.zeros(11, 32)),
        ValueError,
        "x must be bf16, got f32 [11, 32]",
    ),
    "ids of another type": (
        dict(topk_ids=torch.zeros(11, 3, dtype=torch.int16)),
        ValueError,
        "topk_ids must be int32 or int64, got int16 [11, 3]",
    ),
    "a width of another model": (
        dict(x=torch.zeros(11, 31, dtype=torch.bfloat16)),
        ValueError,
        "x must have shape [T, 32], got bf16 [11, 31]",
    ),
    "too many tokens": (
        dict(x=torch.zeros(17, 32, dtype=torch.bfloat16)),
        ValueError,
        "T=17 tokens exceed the planned max_tokens=16",
    ),
    "columns of x": (
        dict(x=torch.zeros(32, 11, dtype=torch.bfloat16).t()),
        ValueError,
        "x needs stride 1 in its last dimension, got bf16 [11, 32] with strides [1, 11]",
    ),
    "another expert's weights": (
        dict(w13=torch.zeros(6, 48, 32, dtype=torch.bfloat16)),
        ValueError,
        "w13 must have shape [7, 48, 32], got bf16 [6, 48, 32]",
    ),
    "an id beyond the experts": (
        dict(topk_ids=torch.full((11, 3), 7)),
        ValueError,
        "topk_ids[0, 0] is 7; legal are 0 to 6, and -1 for no expert",
    ),
    "no tensor": (dict(x="x"), TypeError, "x is str; it must be a tensor"),
    "a missing tensor": (dict(w2=None), TypeError, "w2 is NoneType; it must be a tensor"),
    "complex numbers": (
        dict(x=torch.zeros(11, 32, dtype=torch.complex64)),
        NotImplementedError,
        "x: no distmoe type for elements of complex64",
    ),
    "five dimensions": (
        dict(w13=torch.zeros(1, 1, 1, 1, 1)),
        ValueError,
        "w13: a DLPack tensor has 5 dimensions; 1 to 4 are supported",
    ),
    "bits of another size": (
        dict(x=distmoe.Reinterpreted(torch.zeros(11, 32), "bf16")),
        ValueError,
        "x is f32 [11, 32], whose elements have 4 bytes; those of bf16 have 2",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_outside_the_contract(case):
    changes, kind, words = CASES[case]
    layer = Layer(make_config())
    with distmoe.Context.create(layer.config) as context:
        y = nan_like(layer.x)
        given = dict(**layer.inputs(), **layer.local(context), y=y)
        with pytest.raises(kind) as raised:
            distmoe.routed_experts(context, **{**given, **changes})
        assert words in str(raised.value)
        assert y.isnan().all()
        assert run_forward(context, layer).isfinite().all()


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_scores", "w13", "w2", "y"])
def test_a_tensor_on_a_gpu_is_refused_by_a_context_on_the_cpu(name):
    layer = Layer(make_config())
    with distmoe.Context.create(layer.config) as context:
        given = dict(**layer.inputs(), **layer.local(context), y=nan_like(layer.x))
        with pytest.raises(ValueError, match=f"{name} must be in host memory .*cuda:1"):
            distmoe.routed_experts(context, **{**given, name: OfAGpu(given[name])})
        assert run_forward(context, layer).isfinite().all()


def test_a_refusal_is_raised_on_every_rank():
    config = make_config()
    words = {}

    def body(communicator):
        rank = communicator.rank()
        layer = Layer(config, seed=rank)
        if rank == 1:
            layer.ids = layer.ids.to(torch.int16)
        with distmoe.Context.create(config, communicator) as context:
            with pytest.raises(distmoe.InvalidArgumentError) as raised:
                run_forward(context, layer)
            words[rank] = str(raised.value)
            layer.ids = layer.ids.to(torch.int64)
            assert run_forward(context, layer).isfinite().all()

    distmoe.run_thread_group(2, body)
    assert all(
        "topk_ids must be int32 or int64, got int16 [11, 3]" in words[rank] for rank in words
    )
    assert all("rank 1" in words[rank] for rank in words) and len(words) == 2


def test_routing_beyond_the_plan_is_told_to_every_rank():
    config = make_config(device_scratch_capacity_factor=0.5)
    layer = Layer(config, num_tokens=16)
    with distmoe.Context.create(config) as context:
        with pytest.raises(distmoe.CapacityExceededError) as raised:
            run_forward(context, layer)
        assert raised.value.code == "capacity_exceeded"
        small = Layer(config, num_tokens=4)
        assert run_forward(context, small).isfinite().all()


def test_a_type_that_nothing_has_is_named():
    with pytest.raises(ValueError, match="dtype is 'half'; legal is one of bf16, f16"):
        distmoe.Reinterpreted(torch.zeros(1), "half")


def test_an_inference_context_saves_nothing():
    layer = Layer(make_config(inference=True))
    with distmoe.Context.create(layer.config) as context:
        with pytest.raises(ValueError, match="an inference context saves nothing"):
            distmoe.saving_routed_experts(
                context, **layer.inputs(), **layer.local(context), y=nan_like(layer.x)
            )


def test_what_this_build_lacks_is_unsupported():
    with pytest.raises(distmoe.UnsupportedError) as raised:
        distmoe.Context.create(make_config(hidden_dim=64, intermediate_dim=64), backend="cuda")
    assert isinstance(raised.value, RuntimeError)
