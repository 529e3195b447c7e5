# SPDX-License-Identifier: Apache-2.0
"""What a context owns, keeps and refuses."""

import gc
import threading

import pytest
import torch

import distmoe
from layer import Layer, make_config, nan_like, run_forward, run_training, same_bits


def save(context, layer):
    return distmoe.saving_routed_experts(
        context, **layer.inputs(), **layer.local(context), y=nan_like(layer.x)
    )


def test_it_allocates_what_was_planned_until_it_is_closed():
    config = make_config()
    context = distmoe.Context.create(config, num_threads=2)
    assert context.config is config
    assert context.memory_plan == distmoe.plan_memory(config, 1, num_threads=2)
    assert context.allocated_bytes == context.memory_plan.allocated_bytes
    assert (context.rank, context.size, context.first_expert) == (0, 1, 0)
    assert context.num_local_experts == config.num_experts
    context.close()
    context.close()
    assert context.is_closed and context.allocated_bytes == 0


def test_the_last_call_says_its_load():
    layer = Layer(make_config())
    with distmoe.Context.create(layer.config) as context:
        assert context.last_call().call == 0
        run_forward(context, layer)
        facts = context.last_call()
    routes = layer.ids[layer.ids >= 0]
    assert (facts.call, facts.tokens, facts.slot) == (1, layer.num_tokens, -1)
    assert facts.rows_per_rank == [len(routes)]
    assert facts.rows_per_expert == torch.bincount(routes, minlength=7).tolist()


def test_slots_are_stacks_and_are_selected():
    layer = Layer(make_config(num_activation_slots=2, activation_slot_capacity_factor=1.0))
    with distmoe.Context.create(layer.config) as context:
        bottom, top = save(context, layer), save(context, layer)
        assert [(s.slot, s.slot_layer, s.is_live) for s in (bottom, top)] == [
            (0, 0, True),
            (0, 1, True),
        ]
        with pytest.raises(ValueError, match="activation slot 0 holds 2 forward"):
            save(context, layer)
        context.select_activation_slot(1, 1)
        assert context.selected_activation_slot == 1
        other = save(context, layer)
        assert (other.slot, other.slot_layer) == (1, 0)
        peaks = context.region_peaks()
        assert len(peaks.slot_bytes) == 2 and min(peaks.slot_bytes) > 0
        with pytest.raises(ValueError, match="is not the last one"):
            distmoe.routed_experts_backward(context, bottom, layer.dy, layer.w13, layer.w2)
        for saved in (top, bottom, other):
            distmoe.routed_experts_backward(context, saved, layer.dy, layer.w13, layer.w2)
            assert not saved.is_live
        with pytest.raises(ValueError, match="had its backward already"):
            distmoe.routed_experts_backward(context, top, layer.dy, layer.w13, layer.w2)
        with pytest.raises(ValueError, match="activation slot 2 does not exist"):
            context.select_activation_slot(2, 1)


def test_saved_and_recomputed_backwards_have_the_same_bits():
    results = []
    for factor in (0.0, 1.0):
        layer = Layer(make_config(activation_slot_capacity_factor=factor))
        with distmoe.Context.create(layer.config) as context:
            results.append(run_training(context, layer))
            assert context.last_call().is_recomputed == (factor == 0.0)
    for name, value in results[0].items():
        assert same_bits(value, results[1][name]), name


def test_a_saved_forward_that_is_dropped_asks_for_a_reset():
    layer = Layer(make_config())
    with distmoe.Context.create(layer.config) as context:
        saved = save(context, layer)
        del saved
        gc.collect()
        with pytest.raises(ValueError, match=r"activation slot 0 needs reset\(\)"):
            save(context, layer)
        context.reset()
        stale = save(context, layer)
        context.reset()
        with pytest.raises(ValueError, match=r"from before a reset\(\)"):
            distmoe.routed_experts_backward(context, stale, layer.dy, layer.w13, layer.w2)
        assert run_training(context, layer)["y"].isfinite().all()


def test_a_saved_forward_may_outlive_its_context():
    layer = Layer(make_config())
    context = distmoe.Context.create(layer.config)
    saved = save(context, layer)
    context.close()
    del context
    assert not saved.is_live
    del saved


def test_a_closed_context_refuses_calls():
    layer = Layer(make_config())
    context = distmoe.Context.create(layer.config)
    context.close()
    for call in (
        lambda: distmoe.routed_experts(
            context, **layer.inputs(), w13=layer.w13, w2=layer.w2, y=nan_like(layer.x)
        ),
        context.reset,
        context.check,
    ):
        with pytest.raises(distmoe.ClosedError, match="the context is closed") as raised:
            call()
        assert isinstance(raised.value, RuntimeError) and raised.value.code == "closed"


def test_overlapping_calls_are_refused():
    config = make_config()
    layers = [Layer(config, seed=rank) for rank in range(2)]
    communicators = distmoe.make_thread_group(2)
    contexts = [None, None]
    results = [None, None]

    def create(rank):
        contexts[rank] = distmoe.Context.create(config, communicators[rank])

    def call(rank):
        results[rank] = run_forward(contexts[rank], layers[rank])

    def run_both(body):
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]

    run_both(create)
    first = threading.Thread(target=call, args=(0,))  # waits for rank 1
    first.start()
    with pytest.raises(ValueError, match="began before the previous one ended"):
        while first.is_alive():
            contexts[0].check()
    call(1)
    first.join()
    assert results[0].isfinite().all() and results[1].isfinite().all()
    run_both(call)  # the next correct call works
    assert results[0].isfinite().all()
    [context.close() for context in contexts]


def test_calls_let_other_threads_of_python_run():
    """Rank 0 waits inside its call for rank 1, which could not come if the GIL was held."""
    config = make_config()

    def body(communicator):
        with distmoe.Context.create(config, communicator) as context:
            for _ in range(3):
                assert run_forward(context, Layer(config)).isfinite().all()

    distmoe.run_thread_group(2, body)
