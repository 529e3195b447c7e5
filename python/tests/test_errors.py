# SPDX-License-Identifier: Apache-2.0
"""The classes of errors, as docs/python.md has them."""

import pytest

import distmoe
from distmoe.errors import CLASS_OF_CODE

BASES = dict(
    invalid_argument=ValueError,
    unsupported=NotImplementedError,
    capacity_exceeded=RuntimeError,
    out_of_memory=RuntimeError,
    peer_mismatch=RuntimeError,
    peer_lost=RuntimeError,
    closed=RuntimeError,
    device_fault=RuntimeError,
    io=RuntimeError,
    internal=RuntimeError,
)


@pytest.mark.parametrize("code", BASES)
def test_a_code_has_a_class(code):
    kind = CLASS_OF_CODE[code]
    assert kind.code == code and issubclass(kind, distmoe.Error) and issubclass(kind, BASES[code])
    assert issubclass(kind, RuntimeError) != issubclass(kind, ValueError)
    name = "".join(map(str.capitalize, code.split("_"))) + "Error"
    assert getattr(distmoe, name) is kind


def test_there_are_no_others():
    assert CLASS_OF_CODE.keys() == BASES.keys()


@pytest.mark.parametrize("code", BASES)
def test_an_error_keeps_its_class_and_words_through_the_library(code):
    """On the peer of the rank that met it."""
    met = {}

    def body(communicator):
        config = distmoe.Config(
            max_tokens=1,
            hidden_dim=8,
            intermediate_dim=8,
            top_k=1,
            num_experts=2,
            max_moe_layers_per_activation_slot=1,
        )
        error = CLASS_OF_CODE[code]("out of luck") if communicator.rank() == 0 else None
        with distmoe.Context.create(config, communicator) as context:
            with pytest.raises(CLASS_OF_CODE[code], match="out of luck") as raised:
                distmoe.agree(context, error)
            met[communicator.rank()] = raised.value.code

    distmoe.run_thread_group(2, body)
    assert met == {0: code, 1: code}
