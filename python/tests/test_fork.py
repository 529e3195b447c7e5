# SPDX-License-Identifier: Apache-2.0
"""A context in a forked child is refused with the reason; the child ends, the parent goes on."""

import os
import signal

import pytest

import distmoe
from layer import Layer, make_config, run_forward, same_bits
from torch_model import open_context

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def words_of_child(body) -> str:
    """What `body` returned in a forked child, which must end within 20 s."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        words = "no answer"
        try:
            words = body()
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        finally:
            os.write(writer, words.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        words = answer.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {status} after: {words}"
    return words


def test_a_call_of_the_child_is_refused():
    layer = Layer(make_config())
    context = distmoe.Context.create(layer.config, num_threads=3)
    y = run_forward(context, layer)
    words = words_of_child(lambda: str(run_forward(context, layer)))
    assert words.startswith(f"UnsupportedError: the context belongs to process {os.getpid()}")
    assert "a fork copies no threads" in words
    assert same_bits(run_forward(context, layer), y)
    context.close()


def test_a_child_may_close_and_drop_it_and_make_its_own():
    layer = Layer(make_config())
    contexts = [distmoe.Context.create(layer.config, num_threads=3)]
    y = run_forward(contexts[0], layer)

    def body():
        contexts[0].close()
        contexts.clear()
        with distmoe.Context.create(layer.config, num_threads=3) as own:
            return "same" if same_bits(run_forward(own, layer), y) else "other"

    assert words_of_child(body) == "same"
    assert same_bits(run_forward(contexts[0], layer), y)
    contexts[0].close()


def test_a_module_of_the_child_is_refused():
    with open_context() as context:
        module = distmoe.torch.RoutedExperts(context)
        layer = Layer(context.config)
        words = words_of_child(lambda: str(module(layer.x, layer.ids, layer.scores)))
        assert "UnsupportedError: the context belongs to process" in words
        module(layer.x, layer.ids, layer.scores).backward(layer.dy)
