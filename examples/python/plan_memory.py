# SPDX-License-Identifier: Apache-2.0
"""The activation slots of a pipeline schedule and what a rank allocates for them, without a GPU.

python examples/python/plan_memory.py --budget-gib 40
"""

import argparse
import dataclasses

import distmoe


def one_forward_one_backward(ahead: int, microbatches: int) -> list[tuple[str, int, int]]:
    """The schedule of a pipeline rank that runs `ahead` forwards before its first backward."""
    actions = [("forward", 0, m) for m in range(ahead)]
    for microbatch in range(microbatches):
        actions.append(("backward", 0, microbatch))
        if microbatch + ahead < microbatches:
            actions.append(("forward", 0, microbatch + ahead))
    return actions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-gib", type=float, default=40.0)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()

    slots = distmoe.assign_activation_slots(one_forward_one_backward(3, 8), [(0, 12)], 8)
    config = distmoe.Config(  # the experts of Qwen3-30B-A3B
        max_tokens=8192,
        hidden_dim=2048,
        intermediate_dim=768,
        top_k=8,
        num_experts=128,
        max_moe_layers_per_activation_slot=slots.max_moe_layers_per_activation_slot,
        num_activation_slots=slots.num_activation_slots,
        activation_slot_capacity_factor=1.0,
    )
    budget = int(options.budget_gib * 2**30)
    for factor in (1.0, 0.5, 0.0):
        config = dataclasses.replace(config, activation_slot_capacity_factor=factor)
        plan = distmoe.plan_memory(config, options.ranks, backend="cuda")
        verdict = "fits" if plan.allocated_bytes <= budget else "does not fit"
        print(
            f"{slots.num_activation_slots} slots of {slots.max_moe_layers_per_activation_slot}"
            f" layers, factor {factor}: {plan.allocated_bytes / 2**30:.2f} GiB, {verdict}"
        )
    print(distmoe.explain(distmoe.check_budget(config, options.ranks, budget, backend="cuda")))


if __name__ == "__main__":
    main()
