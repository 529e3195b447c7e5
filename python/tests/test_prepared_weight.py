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


def test_scales_of_the_caller_are_looked_at():
    """In every call until check_scales has: what it refuses no call of it takes."""
    layer = Layer(low_config("mxfp8"))
    made = prepared_of(layer)
    arrays = [torch.from_dlpack(part).clone() for part in (made[0].codes, made[0].scales)]
    own = distmoe.PreparedWeight("mxfp8", *arrays, inference=True)
    expected = forward(layer, *made)
    assert same_bits(forward(layer, own, made[1]), expected)
    good = arrays[1][2, 5, 1].clone()
    arrays[1][2, 5, 1] = 255
    for refused in (lambda: forward(layer, own, made[1]), lambda: distmoe.check_scales(own)):
        with pytest.raises(ValueError, match=r"scale \[2, 5, 1\].*is byte 255; legal are 0 to 254"):
            refused()
    arrays[1][2, 5, 1] = good
    distmoe.check_scales(own)
    arrays[1][2, 5, 1] = 255
    assert forward(layer, own, made[1]).isnan().any()


@pytest.mark.parametrize("inference", [True, False])
def test_nan_weights_reach_results_prepared_or_not(inference):
    """A call does not refuse the NaN scales of what was prepared."""
    config = dataclasses.replace(
        low_config("mxfp8"), inference=inference, max_moe_layers_per_activation_slot=1
    )
    layer = Layer(config)
    layer.w2[1, 3, 2] = float("nan")
    use = dict(format="mxfp8", inference=inference)
    expected = forward(layer, layer.w13, layer.w2)
    assert expected.isnan().any() and not expected.isnan().all()
    made = [distmoe.prepare_block_scaled_weight(w, **use) for w in (layer.w13, layer.w2)]
    assert same_bits(forward(layer, *made), expected)


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
