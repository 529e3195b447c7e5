# SPDX-License-Identifier: Apache-2.0
"""In-place accumulation of dist_moe: which parameters' gradients, of which types."""

import functools
import gc

import pytest
import torch

from dist_moe_layer import D, E, F, Layer, assert_same, context_of
from distmoe import dist_moe
from layer import same_bits
from torch_model import FP32_GRADIENTS

both_ways = pytest.mark.parametrize("has_owners", [False, True])


def options_of(layer, has_owners):
    owners = (layer.w13, layer.w2) if has_owners else None
    return dist_moe.ExecutionOptions(inplace_wgrad_accum=True, wgrad_parameter_owners=owners)


def declare(layer, dtype, *names):
    """Parameters whose gradient is of another type, with one of ones already."""
    for name in names:
        weight = getattr(layer, name)
        weight.grad_dtype = dtype
        weight.grad = torch.ones_like(weight, dtype=dtype)


def expect_added_to_ones(layer, place, *, is_rounded):
    """The FP32 sum of 1 and a gradient that was rounded to BF16 first, or was not."""
    gradient = layer.w13.grad
    assert gradient.data_ptr() == place and gradient.dtype == torch.float32
    for name in ("w13", "w2"):
        addend = getattr(layer, name).grad - 1
        unrounded = expected_addends()[name]
        bound = unrounded.abs() * (2**-8 if is_rounded else 0) + 2**-20
        assert ((addend - unrounded).abs() <= bound).all(), name


@functools.cache
def expected_addends():
    """Gradients in FP32."""
    layer = Layer()
    declare(layer, torch.float32, "w13", "w2")
    layer.w13.grad = layer.w2.grad = None
    return layer.train(context_of(wgrad_dtype=torch.float32))


@both_ways
@pytest.mark.parametrize("wgrad_dtype", [None, torch.float32])
@FP32_GRADIENTS
def test_gradients_are_added_in_the_type_that_is_declared(has_owners, wgrad_dtype):
    layer = Layer()
    declare(layer, torch.float32, "w13", "w2")
    place, context = layer.w13.grad.data_ptr(), context_of(wgrad_dtype=wgrad_dtype)
    layer.forward(context, options_of(layer, has_owners)).backward(layer.dy)
    expect_added_to_ones(layer, place, is_rounded=False)


@both_ways
@pytest.mark.parametrize("shapes", [((E, 2, F, D), (E, D, F)), ((E * 2 * F, D), (E * D, F))])
@FP32_GRADIENTS
def test_sums_are_not_rounded_where_weights_are_views(has_owners, shapes):
    layer, context = Layer(), context_of(wgrad_dtype=torch.float32)
    declare(layer, torch.float32, "w13", "w2")
    place = layer.w13.grad.data_ptr()
    weights = [w.view(shape) for w, shape in zip((layer.w13, layer.w2), shapes, strict=True)]
    inputs = (layer.x, layer.ids, layer.scores)
    y = dist_moe.routed_experts(*inputs, *weights, context, options=options_of(layer, has_owners))
    y.backward(layer.dy)
    expect_added_to_ones(layer, place, is_rounded=True)


@both_ways
@pytest.mark.parametrize(
    ("dtype", "names", "changes", "error", "words"),
    [
        (torch.float32, ["w13"], {}, RuntimeError, "w13 and w2 have different WGRAD dtypes"),
        (torch.float16, ["w13", "w2"], {}, TypeError, "bfloat16 or float32, got torch.float16"),
        (
            torch.float32,
            ["w13", "w2"],
            dict(wgrad_dtype=torch.bfloat16),
            RuntimeError,
            "grad_dtype torch.float32, but Config.wgrad_dtype is torch.bfloat16",
        ),
    ],
)
@FP32_GRADIENTS
def test_types_that_do_not_go_together(has_owners, dtype, names, changes, error, words):
    layer, context = Layer(), context_of(**changes)
    declare(layer, dtype, *names)
    with pytest.raises(error, match=words):
        layer.forward(context, options_of(layer, has_owners))
    assert all((getattr(layer, name).grad == 1).all() for name in names)
    with torch.no_grad():
        assert layer.forward(context, options_of(layer, has_owners)).isfinite().all()
    assert_same(Layer().train(context), Layer().train(context_of(**changes)))


def test_owners_that_own_no_gradient():
    layer, context = Layer(), context_of()
    for owner, words in (
        (layer.w13 * 1, "the owner of w13's gradient must be a leaf"),
        (
            layer.w13.detach(),
            "the owner of w13's gradient must be a parameter that needs gradients",
        ),
    ):
        options = dist_moe.ExecutionOptions(
            inplace_wgrad_accum=True, wgrad_parameter_owners=(owner, layer.w2)
        )
        with pytest.raises(ValueError, match=words):
            layer.forward(context, options)
    options = options_of(layer, has_owners=False)
    layer.w13 = layer.w13 * 1
    with pytest.raises(ValueError, match="to be a parameter or a view of a whole one"):
        layer.forward(context, options)


@both_ways
def test_a_gradient_that_is_not_contiguous(has_owners):
    layer, context = Layer(), context_of()
    shape = layer.w13.shape
    layer.w13.grad = torch.zeros(shape[0], shape[2], shape[1], dtype=torch.bfloat16).mT
    layer.w2.grad = torch.zeros_like(layer.w2)
    y = layer.forward(context, options_of(layer, has_owners))
    error = RuntimeError if has_owners else ValueError
    with pytest.raises(error, match="the gradient of w13.* must be contiguous"):
        y.backward(layer.dy)
    assert not layer.w13.grad.any() and not layer.w2.grad.any()


def test_an_owner_that_is_gone():
    layer, context = Layer(), context_of()
    owners = [torch.nn.Parameter(weight.detach().clone()) for weight in (layer.w13, layer.w2)]
    y = layer.forward(
        context,
        dist_moe.ExecutionOptions(inplace_wgrad_accum=True, wgrad_parameter_owners=tuple(owners)),
    )
    owners.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="the parameter that owns the gradient of .* is gone"):
        y.backward(layer.dy)
    context.reset()
    assert same_bits(layer.train(context)["w2"], Layer().train(context_of())["w2"])
