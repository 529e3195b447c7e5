# SPDX-License-Identifier: Apache-2.0
"""What a call of dist_moe says of an RMSNormPostprocess outside its contract."""

import pytest
import torch

from dist_moe_layer import D, Layer, assert_same, config, context_of, norm_options
from distmoe import dist_moe
from layer import same_bits

GAIN = torch.linspace(0.5, 1.5, D).bfloat16()

TRAINING = [
    (dict(eps=0.0), "eps must be finite and positive, got 0.0"),
    (dict(eps=float("nan")), "eps must be finite and positive, got nan"),
    (dict(output_dtype=torch.float32), "output_dtype must be that of x, torch.bfloat16, got"),
    (dict(norm_output_dtype=torch.bfloat16), "norm_output_dtype must be torch.float32, got"),
    (dict(gain_center=1.0), "gain_center needs a weight, got 1.0 without"),
    (dict(weight=GAIN), "a norm with a weight needs an inference context"),
]


@pytest.mark.parametrize(("changes", "words"), TRAINING)
def test_norms_of_a_training_context(changes, words):
    layer, context = Layer(), context_of()
    plain = Layer().train(context_of(), norm_options())
    with pytest.raises(ValueError, match=words):
        layer.forward(context, norm_options(**changes))
    assert_same(layer.train(context, norm_options()), plain)


INFERENCE = [
    (dict(weight=GAIN, use_kahan=True), "use_kahan is not for a norm with a weight"),
    (
        dict(weight=GAIN.float()),
        r"must be contiguous torch.bfloat16 \[256\] on cpu, got torch.floa",
    ),
    (dict(weight=GAIN[:128]), r"must be contiguous torch.bfloat16 \[256\] on cpu, got .* \[128\]"),
    (dict(weight=GAIN.repeat_interleave(2)[::2]), "the norm's weight must be contiguous"),
    (dict(weight=GAIN.to("meta")), "got torch.bfloat16 .* on meta"),
]


@pytest.mark.parametrize(("changes", "words"), INFERENCE)
def test_norms_of_an_inference_context(changes, words):
    layer, context = Layer(trains=False), context_of(inference=True)
    expected = layer.forward(context_of(inference=True), norm_options(weight=GAIN))
    with pytest.raises(ValueError, match=words):
        layer.forward(context, norm_options(**changes))
    assert same_bits(layer.forward(context, norm_options(weight=GAIN)), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(top_k=3), "top_k must be 2 or 8, got 3"),
        (dict(hidden_dim=192), "multiple of 128 from 256 to 16384, got 192"),
    ],
)
def test_layers_that_have_no_fused_norm(changes, words):
    given = config(**changes)
    context = dist_moe.create_context(group=None, config=given, device="cpu")
    shape = (given.num_experts, 2 * given.intermediate_dim, given.hidden_dim)
    arguments = (
        torch.ones(2, given.hidden_dim).bfloat16(),
        torch.zeros(2, given.top_k, dtype=torch.int64),
        torch.ones(2, given.top_k),
        torch.ones(shape).bfloat16(),
        torch.ones(shape[0], shape[2], given.intermediate_dim).bfloat16(),
        context,
    )
    with pytest.raises(ValueError, match=words):
        dist_moe.routed_experts(*arguments, options=norm_options())
    assert dist_moe.routed_experts(*arguments).isfinite().all()
