# SPDX-License-Identifier: Apache-2.0
"""Copies and pickles: what is plain data has them, what holds memory says why not."""

import copy
import pickle

import pytest
import torch

import distmoe
import distmoe.torch
from dist_moe_layer import context_of
from layer import Layer, make_config, same_bits
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
