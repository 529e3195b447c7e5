# SPDX-License-Identifier: Apache-2.0
"""Wrong use of the PyTorch operators: the exception's class, its words, and what works after."""

import gc
import threading

import pytest
import torch
from torch.autograd import forward_ad

import distmoe
import distmoe.torch
from layer import Layer, make_config, same_bits
from torch_model import Model, open_context


def call(own, layer, **changes):
    given = dict(**layer.inputs(), **layer.local(own), context=own)
    return distmoe.torch.routed_experts(**{**given, **changes})


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(x=torch.zeros(11, 32)), "x must be bf16, got f32 [11, 32]"),
        (dict(topk_ids=torch.zeros(11, 3)), "topk_ids must be int32 or int64, got f32 [11, 3]"),
        (dict(topk_scores=torch.zeros(11, 2)), "topk_scores must have shape [11, 3]"),
        (
            dict(x=torch.zeros(32, 11, dtype=torch.bfloat16).t()),
            "x needs stride 1 in its last dimension, got bf16 [11, 32] with strides [1, 11]",
        ),
    ],
)
def test_arguments_outside_the_contract(changes, words, needs_grad):
    with open_context() as context:
        layer = Layer(context.config)
        layer.w2.requires_grad_(needs_grad)
        with pytest.raises(distmoe.InvalidArgumentError) as raised:
            call(context, layer, **changes)
        assert words in str(raised.value)
        assert call(context, layer).isfinite().all()


def test_inference_contexts_refuse_gradients():
    with open_context(make_config(inference=True)) as context:
        layer = Layer(context.config)
        layer.w13.requires_grad_()
        layer.scores.requires_grad_()
        with pytest.raises(
            ValueError, match=r"topk_scores, w13 require\(s\) grad, but the context"
        ):
            call(context, layer)
        with torch.no_grad():
            assert call(context, layer).isfinite().all()


def test_closed_and_forgotten_contexts():
    with open_context() as context:
        layer = Layer(context.config)
        weights = layer.local(context)
    with pytest.raises(distmoe.ClosedError, match="the context is closed"):
        distmoe.torch.routed_experts(**layer.inputs(), **weights, context=context)
    number = context.number
    del context
    nothing = (None, None, [], 0.0, False, None, 0.0, None)
    with pytest.raises(distmoe.ClosedError, match=f"context {number} does not exist any more"):
        torch.ops.distmoe.routed_experts(
            *layer.inputs().values(), *weights.values(), *nothing, number, False
        )


def test_a_core_context_is_named():
    with open_context() as context:
        with pytest.raises(
            TypeError, match="context is Context; it must be a distmoe.torch.Context"
        ):
            call(context, Layer(context.config), context=context.core)


def test_a_graph_that_is_dropped_asks_for_a_reset():
    with open_context() as context:
        model = Model(context)
        y = model.forward(model.leaves)
        del y
        gc.collect()
        with pytest.raises(ValueError, match=r"activation slot 0 needs reset\(\)"):
            model.forward(model.leaves)
        context.reset()
        assert model.train()["y"].isfinite().all()


def test_backwards_out_of_order_are_refused():
    with open_context() as context:
        layer = Layer(context.config)
        layer.w13.requires_grad_()
        first, second = call(context, layer), call(context, layer)
        with pytest.raises(ValueError, match="is not the last one: layer 1 waits"):
            first.backward(layer.dy)
        second.backward(layer.dy)
        assert layer.w13.grad is not None


def test_a_second_backward_is_refused():
    with open_context() as context:
        layer = Layer(context.config)
        layer.w13.requires_grad_()
        y = call(context, layer)
        y.backward(layer.dy, retain_graph=True)
        with pytest.raises(ValueError, match="had its backward already"):
            y.backward(layer.dy)


def test_a_backward_after_a_reset_is_refused():
    with open_context() as context:
        layer = Layer(context.config)
        layer.w13.requires_grad_()
        y = call(context, layer)
        context.reset()
        with pytest.raises(ValueError, match=r"from before a reset\(\)"):
            y.backward(layer.dy)


def test_norms_that_are_none():
    with open_context() as context:
        layer = Layer(context.config)
        with pytest.raises(ValueError, match="norm.eps is 0"):
            call(context, layer, norm=distmoe.PostExpertNorm(eps=0.0))
        gamma = torch.ones(32, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="gamma .*inference"):
            call(context, layer, norm=distmoe.PostExpertNorm(gamma=gamma))


@pytest.mark.parametrize("name", ["x", "topk_ids", "w2"])
def test_a_meta_tensor_among_real_ones_is_refused(name):
    with open_context() as context:
        layer = Layer(context.config)
        given = {**layer.inputs(), **layer.local(context)}
        with pytest.raises(ValueError, match="must be on one device, got cpu, meta"):
            call(context, layer, **{name: given[name].to("meta")})


@pytest.mark.parametrize("needs_grad", [False, True])
def test_forward_mode_derivatives_are_refused(needs_grad):
    with open_context() as context:
        layer = Layer(context.config)
        layer.w13.requires_grad_(needs_grad)
        words = "has a tangent: distmoe has no forward-mode derivatives"
        with forward_ad.dual_level():
            for name in ("x", "topk_scores", "w2"):
                given = {**layer.inputs(), **layer.local(context)}
                dual = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
                with pytest.raises(distmoe.UnsupportedError, match=words):
                    call(context, layer, **{name: dual})
        with pytest.raises(distmoe.UnsupportedError, match=words):
            torch.func.jvp(lambda x: call(context, layer, x=x), (layer.x,), (layer.x,))
        with torch.no_grad():
            assert call(context, layer).isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0])
def test_a_gpu_where_there_is_none(device):
    with pytest.raises(distmoe.UnsupportedError) as raised:
        distmoe.torch.create_context(make_config(), device=device)
    assert isinstance(raised.value, RuntimeError)
    assert "CUDA" in str(raised.value) or "finds no GPU" in str(raised.value)


def test_what_a_context_and_a_module_are_made_of():
    with pytest.raises(TypeError, match="config is dict; it must be a distmoe.config.Config"):
        distmoe.torch.create_context({}, device="cpu")
    with pytest.raises(TypeError, match="num_threads is str; it must be an int"):
        distmoe.torch.create_context(make_config(), device="cpu", num_threads="2")
    with open_context() as context:
        with pytest.raises(TypeError, match="context is Context; it must be a distmoe.torch"):
            distmoe.torch.RoutedExperts(context.core)


def test_groups_and_devices_that_are_none():
    with pytest.raises(
        TypeError, match="group is int; it must be a torch.distributed process group"
    ):
        distmoe.torch.create_context(make_config(), 3, device="cpu")
    with pytest.raises(ValueError, match="device is meta; legal are cpu and cuda"):
        distmoe.torch.create_context(make_config(), device="meta")
    with pytest.raises(ValueError, match="device is 'gpu': "):
        distmoe.torch.create_context(make_config(), device="gpu")
    with pytest.raises(ValueError, match="there is no process group"):
        distmoe.torch.GroupCommunicator()


def test_overlapping_calls_are_refused():
    """Rank 0 waits in its call for rank 1 while another thread of it begins one more."""
    config = make_config()
    contexts, results = [None, None], [None, None]
    layers = [Layer(config, seed=rank) for rank in range(2)]
    communicators = distmoe.make_thread_group(2)

    def create(rank):
        contexts[rank] = distmoe.torch.create_context(config, communicators[rank], device="cpu")

    def run(rank):
        with torch.no_grad():
            results[rank] = call(contexts[rank], layers[rank])

    def both(body):
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    both(create)
    first = threading.Thread(target=run, args=(0,))
    first.start()
    while contexts[0].core.num_begun_calls == 0:
        assert first.is_alive()
    with pytest.raises(distmoe.InvalidArgumentError, match="began before the previous one ended"):
        call(contexts[0], layers[0])
    run(1)
    first.join()
    assert all(result.isfinite().all() for result in results)
    expected = [result.clone() for result in results]
    both(run)
    assert all(map(same_bits, results, expected))
    [context.close() for context in contexts]
