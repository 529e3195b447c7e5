# SPDX-License-Identifier: Apache-2.0
"""Plans are those of the C++ functions."""

import json
import subprocess

import pytest

import distmoe
from layer import make_config

FACTORS = dict(
    max_tokens=4096,
    hidden_dim=4096,
    intermediate_dim=14336,
    top_k=8,
    num_experts=128,
    max_moe_layers_per_activation_slot=32,
    device_scratch_capacity_factor=1.5,
)


def test_a_plan_has_the_bytes_of_its_formulas():
    config = distmoe.Config(**FACTORS, host_scratch=distmoe.HostScratch())
    plan = distmoe.plan_memory(config, 16)
    assert plan.device_scratch_bytes == 7_449_083_904
    assert plan.host_scratch_bytes == 72_007_811_072
    assert plan.minimum_slot_bytes == 1_073_741_824
    assert plan.balanced_slot_bytes == 77_309_411_328
    groups = ("communication", "metadata", "control", "workspace")
    for group in groups:
        buffers = getattr(plan, f"{group}_buffers")
        assert sum(buffer.bytes for buffer in buffers) == getattr(plan, f"{group}_bytes")


def test_plans_are_equal_by_value():
    config = make_config()
    assert distmoe.plan_memory(config, 2) == distmoe.plan_memory(config, 2)
    assert distmoe.plan_memory(config, 2) != distmoe.plan_memory(config, 3)
    assert distmoe.plan_memory(config, 2) != "a plan"


def test_the_command_plans_the_same(root):
    config = distmoe.Config(**FACTORS)
    command = [
        str(root / "build/bin/distmoe"),
        *"plan --tokens 4096 --hidden 4096 --intermediate 14336 --top-k 8 --experts 128".split(),
        *"--layers 32 --device-factor 1.5 --ep 16 --threads 1 --json".split(),
    ]
    printed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    plan = distmoe.plan_memory(config, 16)
    assert printed["allocated_bytes"] == plan.allocated_bytes
    assert printed["max_useful_slot_bytes"] == plan.max_useful_slot_bytes


def test_a_plan_explains_itself():
    config = make_config()
    plan = distmoe.plan_memory(config, 2)
    text = distmoe.explain(config, plan)
    assert str(plan.allocated_bytes) in text.replace(",", "")


def test_ranks_and_backends_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="ep_size"):
        distmoe.plan_memory(make_config(), 0)
    with pytest.raises(ValueError, match="backend is 'tpu'; legal is one of cpu, cuda"):
        distmoe.plan_memory(make_config(), 1, backend="tpu")


def test_a_budget_that_is_too_small_says_what_would_fit():
    config = make_config(max_tokens=100_000)
    needed = distmoe.plan_memory(config, 1).allocated_bytes
    assert distmoe.check_budget(config, 1, needed).fits
    report = distmoe.check_budget(config, 1, needed * 3 // 4)
    assert not report.fits and report.needed_bytes == needed
    assert 0 < report.largest_max_tokens < 100_000
    smaller = distmoe.plan_memory(make_config(max_tokens=report.largest_max_tokens), 1)
    assert smaller.allocated_bytes <= needed * 3 // 4
    assert str(report.largest_max_tokens) in distmoe.explain(report).replace(",", "")


def test_physical_sections_hold_what_is_in_the_range():
    config = make_config(
        max_tokens=4096, hidden_dim=256, host_scratch=distmoe.HostScratch(), num_activation_slots=2
    )
    plan = distmoe.plan_memory(config, 8, backend="cuda")
    sections = distmoe.physical_sections(plan)
    assert sections.granularity_bytes == 2 << 20 and sections.host_bytes > 0
    parts = (sections.device_prefix_bytes, sections.host_bytes, sections.device_hot_bytes)
    assert all(part % sections.granularity_bytes == 0 for part in parts)
    needed = plan.allocated_bytes - plan.communication_bytes
    assert sum(parts) == needed + sections.padding_bytes
    whole = distmoe.physical_sections(plan, granularity_bytes=1)
    assert whole.host_bytes == plan.host_scratch_bytes and whole.padding_bytes == 0
    with pytest.raises(ValueError, match="granularity"):
        distmoe.physical_sections(plan, 0)


def test_slots_of_a_pipeline_schedule():
    actions = [("forward", 0, 0), ("forward", 0, 1), ("backward", 0, 0), ("forward", 0, 2)]
    actions += [("backward_input", 0, 1), ("backward", 0, 2), ("backward_weight", 0, 1)]
    assignment = distmoe.assign_activation_slots(actions, [(0, 3)], 3)
    assert assignment.num_activation_slots == 2
    assert assignment.max_moe_layers_per_activation_slot == 3
    assert [use.slot for use in assignment.uses] == [0, 1, 0]
    assert assignment.use_of(0, 2).num_moe_layers == 3


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ([("sideways", 0, 0)], "action 0 is 'sideways'; legal is one of forward"),
        ([("backward", 0, 0)], "action 0"),
        ([("forward", 1, 0)], "stage 1"),
    ],
)
def test_malformed_schedules_are_refused(actions, words):
    with pytest.raises(ValueError) as raised:
        distmoe.assign_activation_slots(actions, [(0, 3)], 1)
    assert words in str(raised.value)
