# SPDX-License-Identifier: Apache-2.0
"""Weights prepared for block-scaled contexts of dist_moe: fields, bits, memory, refusals."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_moe_layer import E, F, Layer, assert_same, config
from distmoe import dist_moe
from layer import same_bits

MXFP8 = dist_moe.BlockScaledConfig()
NVFP4 = dist_moe.BlockScaledConfig(format="nvfp4")


def context_of(block_scaled, **changes):
    changes = dict(intermediate_dim=256 if block_scaled is NVFP4 else F, **changes)
    own = config(block_scaled=block_scaled, inference=block_scaled is NVFP4, **changes)
    return dist_moe.create_context(group=None, config=own, device="cpu")


def random_weight(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16()


def decoded(data, scale):
    """Codes of MXFP8 [G, N, K] times scales [G * N, K / 32]."""
    return data.flatten(0, 1).double() * scale.double().repeat_interleave(32, dim=1)


def test_training_weights_have_one_set_of_codes_for_both_products():
    weight = random_weight(2, 128, 256).requires_grad_()
    made = dist_moe.prepare_block_scaled_weight(weight, MXFP8)
    assert (made.source, made.format) == (weight, "mxfp8_e4m3")
    assert made.dgrad_data is made.fprop_data and made.fprop_data.dtype == torch.float8_e4m3fn
    assert (made.fprop_data.shape, made.fprop_scale.shape) == ((2, 128, 256), (256, 8))
    assert (made.dgrad_scale.shape, made.dgrad_scale.dtype) == ((512, 4), torch.float8_e8m0fnu)
    assert made.global_scale is None and made.global_scale_inv is None
    assert len(made.storage_tensors()) == 3
    assert not any(t.requires_grad for t in made.storage_tensors())
    along_rows = decoded(made.fprop_data, made.fprop_scale).view(2, 128, 256)
    transposed = made.dgrad_data.view(torch.uint8).mT.contiguous().view(torch.float8_e4m3fn)
    assert torch.equal(decoded(transposed, made.dgrad_scale).view(2, 256, 128).mT, along_rows)
    assert ((along_rows - weight.double()).abs() <= 2**-4 * along_rows.abs() + 2**-8).all()


def test_inference_weights_have_scales_of_their_own_rows():
    weight = random_weight(2, 40, 64)
    made = dist_moe.prepare_block_scaled_weight(weight, MXFP8, inference=True)
    assert made.fprop_scale.shape == (80, 2) and made.dgrad_data is made.dgrad_scale is None
    largest = weight.view(80, 2, 32).abs().amax(-1).double()
    assert (largest <= 448 * made.fprop_scale.double()).all()
    assert (largest > 224 * made.fprop_scale.double()).all()


def test_nvfp4_weights_have_a_factor_for_each_expert():
    weight = random_weight(3, 32, 64)
    weight[1] *= 100
    weight[2] = 0
    made = dist_moe.prepare_block_scaled_weight(weight, NVFP4)
    assert (made.fprop_data.shape, made.fprop_scale.shape) == ((3, 32, 32), (96, 4))
    largest = weight.float().abs().amax((1, 2)).clamp(min=1e-12)
    assert torch.equal(made.global_scale, torch.full((3,), 2688.0) / largest)
    assert torch.equal(made.global_scale_inv, 1 / made.global_scale)
    assert made.global_scale.isfinite().all()


@pytest.mark.parametrize("kind", ["plain", "callback", "hook", "owners"])
def test_prepared_and_bf16_weights_train_alike(kind):
    layer = Layer()
    options = {
        "plain": {},
        "callback": dict(experts_output_postprocess=lambda rows: rows * 1),
        "hook": dict(wgrad_postprocess_fn=lambda name, gradient: gradient),
        "owners": dict(inplace_wgrad_accum=True, wgrad_parameter_owners=(layer.w13, layer.w2)),
    }[kind]
    options = dist_moe.ExecutionOptions(**options)
    expected = layer.train(context_of(MXFP8), options)
    leaves = layer.w13, layer.w2
    layer.w13, layer.w2 = (dist_moe.prepare_block_scaled_weight(w, MXFP8) for w in leaves)
    y = layer.forward(context_of(MXFP8), options)
    y.backward(layer.dy)
    results = dict(y=y.detach(), x=layer.x.grad, scores=layer.scores.grad)
    assert_same(results | dict(w13=leaves[0].grad, w2=leaves[1].grad), expected)


def test_nvfp4_contexts_take_prepared_weights():
    layer = Layer(trains=False)
    w13, w2 = random_weight(E, 512, 256) / 16, random_weight(E, 256, 256) / 16
    context = context_of(NVFP4)
    layer.w13, layer.w2 = w13, w2
    with pytest.raises(ValueError, match="nvfp4 needs it prepared"):
        layer.forward(context)
    layer.w13, layer.w2 = (dist_moe.prepare_block_scaled_weight(w, NVFP4) for w in (w13, w2))
    y = layer.forward(context)
    bf16 = Layer(trains=False)
    bf16.w13, bf16.w2 = w13, w2
    plain = dist_moe.create_context(
        group=None, config=config(intermediate_dim=256, inference=True), device="cpu"
    )
    exact = bf16.forward(plain).float()
    assert 0.01 < (y.float() - exact).norm() / exact.norm() < 0.3


def test_memory_is_kept_and_filled_again():
    first, second = random_weight(2, 64, 32), random_weight(2, 64, 32) * 3 + 1
    made = dist_moe.prepare_block_scaled_weight(first, MXFP8)
    expected = dist_moe.prepare_block_scaled_weight(second, MXFP8)
    storages = [t.untyped_storage()._cdata for t in made.storage_tensors()]
    for is_emptied in (False, True):
        if is_emptied:
            for tensor in made.storage_tensors():
                tensor.untyped_storage().resize_(0)
        again = dist_moe.prepare_block_scaled_weight(second, MXFP8, out=made)
        assert again is not made and again.source is second
        assert [t.untyped_storage()._cdata for t in again.storage_tensors()] == storages
        for ours, theirs in zip(again.storage_tensors(), expected.storage_tensors()):
            assert same_bits(ours, theirs)
        again.dgrad_scale.view(torch.uint8).zero_()


def test_emptied_memory_is_refused_in_a_call():
    layer = Layer(trains=False)
    context = context_of(MXFP8)
    prepared = [dist_moe.prepare_block_scaled_weight(w, MXFP8) for w in (layer.w13, layer.w2)]
    layer.w13, layer.w2 = prepared
    expected = layer.forward(context)
    prepared[0].fprop_data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="w13"):
        layer.forward(context)
    dist_moe.prepare_block_scaled_weight(prepared[0].source, MXFP8, out=prepared[0])
    assert same_bits(layer.forward(context), expected)


def test_fake_tensors_have_the_shapes():
    with FakeTensorMode():
        made = dist_moe.prepare_block_scaled_weight(
            torch.empty(2, 128, 256, dtype=torch.bfloat16), MXFP8
        )
    assert (made.fprop_scale.shape, made.dgrad_scale.shape) == ((256, 8), (512, 4))


def test_wrong_weights():
    prepare = dist_moe.prepare_block_scaled_weight
    weight = random_weight(2, 64, 32)
    made = prepare(weight, MXFP8)
    coded = prepare(weight, MXFP8, inference=True)
    for given, format, changes, error, message in (
        (torch.zeros(128, 256), MXFP8, {}, ValueError, r"must be \[G, N, K\], got shape \[128, "),
        (torch.zeros(2, 100, 256), MXFP8, {}, ValueError, "multiples of 32, got 100 and 256"),
        (torch.zeros(2, 32, 32), MXFP8, {}, TypeError, "must be torch.bfloat16"),
        (weight, "mxfp8", {}, TypeError, "config must be a BlockScaledConfig"),
        (weight, MXFP8, dict(out=3), TypeError, "out must be a PreparedWeight"),
        (weight, MXFP8, dict(out=made, inference=True), ValueError, "out is for mxfp8_e4m3"),
        (weight, NVFP4, dict(out=made), ValueError, "out is for mxfp8_e4m3"),
        (weight, MXFP8, dict(out=coded), ValueError, "out is mxfp8_e4m3 for inference"),
        (weight[:1], MXFP8, dict(out=made), ValueError, r"out was made of torch.bfloat16 \[2, 64"),
    ):
        with pytest.raises(error, match=message):
            prepare(given, format, **changes)


def test_wrong_calls():
    layer, context = Layer(), context_of(MXFP8)
    good = {
        n: dist_moe.prepare_block_scaled_weight(getattr(layer, n), MXFP8) for n in ("w13", "w2")
    }
    coded = dist_moe.prepare_block_scaled_weight(layer.w2, MXFP8, inference=True)
    hook = dist_moe.ExecutionOptions(weights_preprocess_fn=lambda weight: weight)
    bf16 = dist_moe.create_context(group=None, config=config(), device="cpu")
    for changes, own, options, error, message in (
        (dict(w2=layer.w2), context, None, TypeError, "must both be prepared weights"),
        (dict(w2=coded), context, None, ValueError, "for mxfp8 inference; this context is for mxf"),
        (dict(w2=good["w13"]), context, None, ValueError, "w2 must be"),
        ({}, bf16, None, ValueError, "need a context with block_scaled"),
        ({}, context, hook, ValueError, "weights_preprocess_fn is not for prepared"),
    ):
        kept = dict(vars(layer))
        vars(layer).update({**good, **changes})
        with pytest.raises(error, match=message):
            layer.forward(own, options)
        vars(layer).update(kept)
