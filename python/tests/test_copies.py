# SPDX-License-Identifier: Apache-2.0
"""Copies and pickles: what is plain data has them, what holds memory says why not."""

import copy
import pickle

import pytest
import torch

import distmoe
import distmoe.torch
from dist_moe_layer import context_of
from layer import Layer, make_config, run_training, same_bits
from torch_model import open_context


def copies_of(thing):
    return [copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))]


def test_plain_data_is_copied_and_pickled():
    config = make_config(host_scratch=distmoe.HostScratch())
    assert copies_of(config) == [config] * 3
    norm = distmoe.PostExpertNorm(eps=1e-5)
    assert copies_of(norm) == [norm] * 3
    error = distmoe.PeerLostError("rank 1 did not come")
    for copied in copies_of(error):
        assert (type(copied), str(copied), copied.code) == (type(error), str(error), "peer_lost")


def test_what_functions_return_is_copied_and_pickled():
    config = make_config(host_scratch=distmoe.HostScratch())
    actions = [("forward", 0, 0), ("backward", 0, 0)]
    values = [
        distmoe.plan_memory(config, 2, backend="cuda"),
        distmoe.plan_memory(config, 2, num_threads=3).workspace_buffers[0],
        distmoe.physical_sections(distmoe.plan_memory(config, 2)),
        distmoe.check_budget(config, 2, 10**6),
        distmoe.assign_activation_slots(actions, [(0, 2)], 1),
        distmoe.TcpGroup(1, 2, "host", 3, "job"),
    ]
    with distmoe.Context.create(make_config()) as context:
        run_training(context, Layer(make_config()))
        values += [context.last_call(), context.region_peaks()]
    assert values[-2].call == 2 and sum(values[-2].rows_per_expert) == 32
    for value in values:
        assert copies_of(value) == [value] * 3
        assert repr(value).startswith(f"{type(value).__name__}("), repr(value)
    assert values[0] != distmoe.plan_memory(config, 2) and values[0] != "a plan"
    assert distmoe.explain(config, copy.deepcopy(values[0])) == distmoe.explain(config, values[0])


def test_what_stands_for_a_tensor_is_copied_and_pickled():
    shape = distmoe.TensorShape("bf16", [2, 3], [4, 1], 1)
    for copied in copies_of(shape):
        assert (copied.dtype, copied.shape, copied.strides) == ("bf16", [2, 3], [4, 1])
        assert copied.cuda_device == 1
    array = torch.arange(6, dtype=torch.int16).numpy().view("uint16")
    for copied in copies_of(distmoe.Reinterpreted(array, "bf16")):
        assert copied.dtype == "bf16" and (copied.array == array).all()


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_quantised_matrices_are_copied_and_pickled(format):
    matrix = distmoe.quantise(torch.randn(32, 64).bfloat16(), format)
    expected = torch.from_dlpack(distmoe.dequantise(matrix))
    for copied in copies_of(matrix):
        assert (copied.format, copied.num_columns) == (format, 64)
        assert same_bits(torch.from_dlpack(distmoe.dequantise(copied)), expected)


def test_a_saved_forward_says_why_not():
    layer = Layer(make_config())
    with distmoe.Context.create(layer.config) as context:
        y = torch.empty_like(layer.x)
        given = dict(**layer.inputs(), **layer.local(context), y=y)
        saved = distmoe.saving_routed_experts(context, **given)
        with pytest.raises(TypeError, match="SavedForward: it names what one context keeps"):
            copy.deepcopy(saved)
        context.discard(saved)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_contexts_and_weights_of_the_core_say_why_not(how):
    with distmoe.Context.create(make_config()) as context:
        with pytest.raises(TypeError, match="a distmoe.Context: it holds memory, threads and"):
            how(context)
    weight = torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    prepared = distmoe.prepare_block_scaled_weight(weight, "mxfp8")
    with pytest.raises(TypeError, match="a distmoe.PreparedWeight: its memory may be that of"):
        how(prepared)


@pytest.mark.parametrize("make", [open_context, context_of])
def test_contexts_of_torch_are_shared_by_copies_and_say_why_no_pickle(make):
    context = make()
    with context if make is open_context else _closing(context) as opened:
        assert copy.copy(opened) is opened and copy.deepcopy(opened) is opened
        with pytest.raises(TypeError, match=r"Context: it holds memory, threads and peers"):
            pickle.dumps(opened)


class _closing:
    def __init__(self, context):
        self.context = context

    def __enter__(self):
        return self.context

    def __exit__(self, *_):
        self.context.close()


def test_modules_are_copied_and_pickled_by_their_state():
    with open_context() as context:
        module = distmoe.torch.RoutedExperts(context, has_bias=True)
        with pytest.raises(TypeError, match=r"save the state_dict\(\) of modules"):
            pickle.dumps(module)
        state = pickle.loads(pickle.dumps(module.state_dict()))
        other = distmoe.torch.RoutedExperts(context, has_bias=True)
        other.load_state_dict(state)
        copied = copy.deepcopy(module)
        layer = Layer(context.config)
        with torch.no_grad():
            expected = module(layer.x, layer.ids, layer.scores)
            assert same_bits(other(layer.x, layer.ids, layer.scores), expected)
            assert same_bits(copied(layer.x, layer.ids, layer.scores), expected)


def test_prepared_weights_of_torch_are_copied_and_pickled():
    weight = torch.randn(7, 64, 64).bfloat16()
    prepared = distmoe.torch.prepare_block_scaled_weight(weight, "mxfp8")
    for copied in copies_of(prepared):
        assert copied.format == "mxfp8" and not copied.inference
        assert all(map(same_bits, copied.tensors(), prepared.tensors()))
