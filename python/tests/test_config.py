# SPDX-License-Identifier: Apache-2.0
"""A configuration that exists is legal; what is not is refused with its value."""

import dataclasses

import pytest

import distmoe
from layer import make_config


def test_what_is_given_is_kept_and_compared():
    config = make_config(activation="swiglu_clamped", wgrad_dtype="fp32")
    assert (config.activation, config.wgrad_dtype, config.timeout) == (
        "swiglu_clamped",
        "fp32",
        20.0,
    )
    assert config == dataclasses.replace(config)
    assert config != dataclasses.replace(config, max_tokens=15)
    assert hash(config) == hash(dataclasses.replace(config))


def test_fields_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_config().max_tokens = 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(max_tokens=0), "max_tokens is 0; legal is 1 to"),
        (dict(top_k=8), "top_k is 8; legal is 1 to num_experts, which is 7"),
        (dict(activation_slot_bytes=-1), "activation_slot_bytes is -1"),
        (
            dict(activation_slot_capacity_factor=float("nan")),
            "activation_slot_capacity_factor is nan",
        ),
        (dict(precision="fp8"), "precision is 'fp8'; legal is one of bf16, mxfp8, nvfp4, mxfp4"),
        (dict(wgrad_dtype="fp16"), "wgrad_dtype is 'fp16'; legal is one of none, bf16, fp32"),
        (dict(timeout=float("inf")), "timeout is inf s"),
        (dict(timeout=0.0), "timeout is 0"),
        (dict(max_tokens=2**70), f"max_tokens is {2**70}, beyond 64 bits"),
    ],
)
def test_illegal_values_are_refused(changes, words):
    with pytest.raises(distmoe.InvalidArgumentError) as raised:
        make_config(**changes)
    assert words in str(raised.value)
    assert raised.value.code == "invalid_argument"
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(max_tokens=True), "max_tokens is True; it must be an integer"),
        (dict(max_tokens=1.5), "max_tokens is 1.5; it must be an integer"),
        (dict(swiglu_limit="7"), "swiglu_limit is '7'; it must be a number"),
        (dict(inference=1), "inference is 1; it must be a bool"),
        (dict(precision=8), "precision is 8; it must be a string"),
        (dict(host_scratch=2.0), "host_scratch is 2.0; it must be a HostScratch"),
    ],
)
def test_values_of_another_type_are_refused(changes, words):
    with pytest.raises(TypeError) as raised:
        make_config(**changes)
    assert words in str(raised.value)


def test_what_is_no_config_is_refused():
    with pytest.raises(TypeError, match="config is 3; it must be a Config"):
        distmoe.plan_memory(3, 1)
