# SPDX-License-Identifier: Apache-2.0
"""Prepared weights take the place of BF16 ones with the same bits."""

import dataclasses

import pytest
import torch

import distmoe
from layer import Layer, make_config, nan_like, same_bits


def low_config(precision):
    return make_config(
        precision=precision, inference=True, hidden_dim=64, intermediate_dim=32, num_experts=3
    )


def forward(layer, w13, w2):
    y = nan_like(layer.x)
    with distmoe.Context.create(layer.config) as context:
        distmoe.routed_experts(context, **layer.inputs(), w13=w13, w2=w2, y=y)
    return y


def prepared_of(layer, **changes):
    values = dict(format=layer.config.precision, inference=True, **changes)
    return [distmoe.prepare_block_scaled_weight(w, **values) for w in (layer.w13, layer.w2)]


@pytest.mark.parametrize("precision", ["mxfp8", "mxfp4"])
def test_prepared_and_bf16_weights_give_the_same_bits(precision):
    layer = Layer(low_config(precision))
    expected = forward(layer, layer.w13, layer.w2)
    assert expected.isfinite().all()
    assert same_bits(forward(layer, *prepared_of(layer)), expected)


def test_nvfp4_needs_prepared_weights():
    layer = Layer(low_config("nvfp4"))
    with pytest.raises(ValueError, match="nvfp4 needs it prepared"):
        forward(layer, layer.w13, layer.w2)
    assert forward(layer, *prepared_of(layer)).isfinite().all()


def test_memory_of_the_caller_is_refilled_and_read():
    layer = Layer(low_config("nvfp4"))
    made = prepared_of(layer)
    fields = ("codes", "scales", "global_scales")
    copies = [[torch.from_dlpack(getattr(w, name)).clone() for name in fields] for w in made]
    own = [distmoe.PreparedWeight("nvfp4", *copy, inference=True) for copy in copies]
    expected = forward(layer, *made)
    assert same_bits(forward(layer, *own), expected)
    distmoe.refill_prepared_weight(layer.w13 * 2, own[0])
    other = distmoe.prepare_block_scaled_weight(layer.w13 * 2, "nvfp4", inference=True)
    for name, copy in zip(fields, copies[0], strict=True):
        assert same_bits(copy, torch.from_dlpack(getattr(other, name))), name
    assert not same_bits(forward(layer, *own), expected)


def test_wrong_prepared_weights():
    layer = Layer(low_config("mxfp8"))
    w13, w2 = prepared_of(layer)
    bf16 = Layer(dataclasses.replace(layer.config, precision="bf16"))
    with pytest.raises(ValueError, match="is prepared for mxfp8; this context computes bf16"):
        forward(bf16, w13, w2)
    with pytest.raises(ValueError, match="prepared w13"):
        forward(layer, w2, w2)
    with pytest.raises(ValueError, match=r"w13.codes must be uint8, the bits of f8_e4m3"):
        forward(layer, distmoe.PreparedWeight("mxfp8", layer.x, layer.x, inference=True), w2)
    with pytest.raises(ValueError, match="format is 'fp8'; legal is one of"):
        distmoe.prepare_block_scaled_weight(layer.w13, "fp8")
    with pytest.raises(ValueError, match="nvfp4"):
        distmoe.prepare_block_scaled_weight(layer.w13, "nvfp4")
