# SPDX-License-Identifier: Apache-2.0
"""Calls of dist_moe under activation checkpointing have the bits of those without."""

import pytest
from torch.utils.checkpoint import checkpoint

from dist_moe_layer import Layer, context_of, norm_options
from distmoe import InvalidArgumentError, dist_moe
from layer import same_bits


def owned(layer):
    return dict(inplace_wgrad_accum=True, wgrad_parameter_owners=(layer.w13, layer.w2))


OPTIONS = {
    "none": lambda layer: dist_moe.ExecutionOptions(),
    "norm": lambda layer: norm_options(),
    "in place": lambda layer: dist_moe.ExecutionOptions(inplace_wgrad_accum=True),
    "postprocess": lambda layer: dist_moe.ExecutionOptions(
        experts_output_postprocess=lambda rows: rows * 1
    ),
    "owners": lambda layer: dist_moe.ExecutionOptions(**owned(layer)),
    "preprocess": lambda layer: dist_moe.ExecutionOptions(
        weights_preprocess_fn=lambda weight: weight * 1
    ),
}


def forward(layer, context, options, *, use_reentrant):
    def call(x):
        arguments = (x, layer.ids, layer.scores, layer.w13, layer.w2, context)
        return dist_moe.routed_experts(*arguments, options=options)

    return checkpoint(call, layer.x, use_reentrant=use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_changes_no_bit(name, use_reentrant):
    plain, layer, context = Layer(), Layer(), context_of()
    expected = plain.train(context_of(), OPTIONS[name](plain))
    y = forward(layer, context, OPTIONS[name](layer), use_reentrant=use_reentrant)
    if name in ("owners", "preprocess") and not use_reentrant:  # as docs/python.md says
        with pytest.raises(InvalidArgumentError, match=r"needs reset\(\)"):
            y.backward(layer.dy)
        return
    y.backward(layer.dy)
    assert same_bits(y.detach(), expected.pop("y"))
    for leaf, gradient in expected.items():
        assert same_bits(getattr(layer, leaf).grad, gradient), leaf
    assert same_bits(Layer().train(context)["w13"], Layer().train(context_of())["w13"])
