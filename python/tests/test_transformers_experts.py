# SPDX-License-Identifier: Apache-2.0
"""Passes, contexts and refusals of distmoe's experts in a transformers model."""

import copy
import gc
import weakref

import pytest
import torch

import distmoe
from hf_models import (
    ExpertsOptions,
    experts_modules,
    gradients_of,
    load,
    loss_of,
    pool_of,
    register,
    save_random_olmoe,
)
from layer import relative_error, same_bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_random_olmoe(tmp_path_factory.mktemp("olmoe"))


@pytest.fixture
def model(folder):
    return load(folder, "distmoe")


def text(num_tokens, seed=3):
    return torch.randint(64, (2, num_tokens), generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(left, right):
    assert left.keys() == right.keys() and len(left) > 10
    for name, gradient in left.items():
        assert same_bits(gradient, right[name]), name


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_passes_may_wait_for_their_backwards_in_any_order(model, order):
    texts = [text(9, seed=4), text(14, seed=5)]
    alone = [gradients_of(model, each) for each in texts]
    losses = [loss_of(model, each) for each in texts]
    for index in order:
        model.zero_grad()
        losses[index].backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert_same_gradients(gradients, alone[index])
    assert len(pool_of(model)._passes) == 2


def test_a_loss_without_backward_costs_nothing_later(model):
    expected = gradients_of(model, text(9))
    for _ in range(3):
        loss_of(model, text(9, seed=6))
    assert_same_gradients(gradients_of(model, text(9)), expected)
    assert len(pool_of(model)._passes) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_bit(model, use_reentrant):
    expected = gradients_of(model, text(9))
    model.train()
    model.activation_checkpointing_enable(dict(use_reentrant=use_reentrant))
    for _ in range(2):
        assert_same_gradients(gradients_of(model, text(9)), expected)
    assert len(pool_of(model)._passes) <= 2


def test_the_slot_factor_changes_no_bit(folder, model):
    register("distmoe_recomputed", ExpertsOptions(activation_slot_capacity_factor=0.0))
    recomputed = load(folder, "distmoe_recomputed")
    assert_same_gradients(gradients_of(recomputed, text(9)), gradients_of(model, text(9)))
    contexts = [pool_of(each)._passes[-1].context for each in (recomputed, model)]
    assert [context.last_call().is_recomputed for context in contexts] == [True, False]
    assert contexts[0].allocated_bytes < contexts[1].allocated_bytes


def test_contexts_grow_and_go_with_the_model(folder):
    model = load(folder, "distmoe")
    with torch.no_grad():
        for num_tokens in (3, 40, 5):
            loss_of(model, text(num_tokens))
    pool = pool_of(model)
    assert pool._forward_only.config.max_tokens == 128  # of 80 tokens
    assert pool._forward_only.config.inference and not pool._passes
    context = weakref.ref(pool._forward_only)
    del pool, model
    gc.collect()
    assert context() is None


def test_generation_agrees_with_the_stock_experts(folder, model):
    prompt = text(6)
    arguments = dict(max_new_tokens=5, do_sample=False, use_cache=True)
    stock = load(folder, "grouped_mm").generate(prompt, **arguments)
    assert torch.equal(model.generate(prompt, **arguments), stock)


def test_a_model_is_copied_with_experts_of_its_own(model):
    expected = gradients_of(model, text(9))
    twin = copy.deepcopy(model)
    assert_same_gradients(gradients_of(twin, text(9)), expected)
    assert pool_of(twin) is not pool_of(model)


def test_frozen_experts_get_no_gradient_and_pass_it_on(folder, model):
    expected = gradients_of(model, text(9))
    for module in experts_modules(model):
        module.requires_grad_(False)
    gradients = gradients_of(model, text(9))
    assert set(expected) - set(gradients) == {name for name in expected if ".experts." in name}
    for name, gradient in gradients.items():
        assert same_bits(gradient, expected[name]), name


def test_experts_of_other_ranks_add_nothing(model):
    loss_of(model, text(3)).backward()
    module = experts_modules(model)[0]
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(7)).bfloat16()
    ids = torch.tensor([[0, 6, 2], [6, 6, 6], [5, 1, 6], [3, 4, 0], [6, 2, 1]])
    scores = torch.rand(5, 3, generator=torch.Generator().manual_seed(8)) + 0.1
    here = ids < 6
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"topk_ids\[0, 1\] is 6; legal are 0 to 5"):
            module(x, ids, scores)
        expected = module(x, ids.where(here, 0), scores.where(here, 0.0))
        module._is_expert_parallel = True
        assert torch.equal(module(x, ids, scores), expected)
        assert not module(x, ids, scores)[1].any()


def test_fp32_needs_autocast(folder):
    model = load(folder, "distmoe", torch.float32)
    message = r"OlmoeExperts got torch.float32 \[18, 32\]; distmoe computes in torch.bfloat16"
    with pytest.raises(ValueError, match=message):
        loss_of(model, text(9))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, text(9))
    loss.backward()
    exact = loss_of(load(folder, "eager", torch.float32), text(9))
    assert abs(float(loss.detach() - exact.detach())) < 0.05
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("change", ["activation", "norm", "gate"])
def test_what_distmoe_cannot_run_is_refused(model, change):
    module = experts_modules(model)[0]
    if change == "activation":
        module.act_fn = torch.nn.GELU()
        message = "OlmoeExperts computes another activation than swiglu and swiglu_clamped"
    elif change == "norm":
        module.has_post_expert_norm = True
        message = "OlmoeExperts has a norm after each expert, which distmoe cannot run"
    else:
        module.has_gate = False
        message = "OlmoeExperts has no gate, which distmoe cannot run"
    with pytest.raises(distmoe.UnsupportedError, match=message):
        loss_of(model, text(9))


def test_mxfp8_is_near_bf16_forward_and_backward(folder, model):
    coded = load(folder, "distmoe_mxfp8")
    with torch.no_grad():
        exact, near = loss_of(model, text(9)), loss_of(coded, text(9))
    assert near != exact and abs(near - exact) < 0.02 * abs(exact)
    gradients = gradients_of(coded, text(9))
    assert len(gradients) > 10 and all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_prepared_weights_follow_the_parameters(folder, precision):
    model = load(folder, f"distmoe_{precision}")
    with torch.no_grad():
        before = loss_of(model, text(9))
        assert loss_of(model, text(9)) == before
        experts_modules(model)[0].down_proj.mul_(2)
        after = loss_of(model, text(9))
        assert after != before
        experts_modules(model)[0].down_proj.div_(2)
        assert loss_of(model, text(9)) == before


def test_prepared_weights_follow_a_fused_optimizer(folder):
    model = load(folder, "distmoe_mxfp8")
    with torch.no_grad():
        before = loss_of(model, text(9))
    gradients_of(model, text(9))
    experts = list(experts_modules(model)[0].parameters())
    torch.optim.AdamW(experts, lr=0.1, fused=True).step()
    with torch.no_grad():
        after = loss_of(model, text(9))
        experts[0].add_(0)  # seen in any case
        assert loss_of(model, text(9)) == after != before


def test_a_model_of_inference_mode_has_prepared_weights(folder):
    with torch.no_grad():
        expected = loss_of(load(folder, "distmoe_mxfp8"), text(9))
    with torch.inference_mode():
        assert loss_of(load(folder, "distmoe_mxfp8"), text(9)) == expected


def test_mxfp8_trains_and_nvfp4_does_not(folder, model):
    bf16 = gradients_of(model, text(9))
    mxfp8 = gradients_of(load(folder, "distmoe_mxfp8"), text(9))
    for name, gradient in mxfp8.items():
        assert relative_error(gradient, bf16[name]) < 0.2, name
    assert not all(same_bits(gradient, bf16[name]) for name, gradient in mxfp8.items())
    with pytest.raises(ValueError, match="nvfp4"):
        loss_of(load(folder, "distmoe_nvfp4"), text(9))


def test_a_loaded_model_switches(folder, model):
    switched = load(folder, "eager")
    loss_of(switched, text(9))
    switched.set_experts_implementation("distmoe")
    assert_same_gradients(gradients_of(switched, text(9)), gradients_of(model, text(9)))


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (dict(precision="fp8"), ValueError, "precision is 'fp8'; legal is one of bf16, mxfp8,"),
        (dict(precision=None), ValueError, "precision is None"),
        (dict(activation_slot_capacity_factor=-1.0), ValueError, "activation_slot_capacity_factor"),
        (dict(activation_slot_capacity_factor="all"), TypeError, "'all'; it must be a number"),
        (dict(activation_policy="thin"), ValueError, "activation_policy is 'thin'; legal is one"),
        (dict(activation_policy="lean", precision="mxfp8"), ValueError, "lean"),
        (dict(num_threads=-1), ValueError, "num_threads is -1; legal are 0"),
        (dict(num_threads=2.5), TypeError, "num_threads is 2.5; it must be an integer"),
    ],
)
def test_options_are_checked_when_they_are_made(changes, kind, words):
    with pytest.raises(kind, match=words):
        ExpertsOptions(**changes)


def test_what_is_registered_has_a_name_and_options():
    with pytest.raises(TypeError, match="name is int; it must be a string"):
        register(3, ExpertsOptions())
    with pytest.raises(ValueError, match="name is empty"):
        register("", ExpertsOptions())
    with pytest.raises(TypeError, match="options is dict; it must be ExpertsOptions"):
        register("mine", {})
