# SPDX-License-Identifier: Apache-2.0
"""What Python and PyTorch add to a call of one token, and how long the package takes to import.

    build/venv/bin/python python/bench/operator_overhead.py [build/bin/bench_one_token_call]

Medians of 10,000 calls (`--calls`) in microseconds; D=64, F=32, E=8, K=2, one rank, one thread. The
empty operators have the signatures of distmoe's and return memory that nobody wrote, one with a
gradient formula that saves the same tensors. The program named measures the same calls in C++.
"""

import argparse
import functools
import statistics
import subprocess
import sys
import time

import torch

import distmoe
import distmoe.torch
from distmoe.torch import operators

HIDDEN, INNER, EXPERTS, TOP_K = 64, 32, 8, 2


def median_us(call, num_calls: int) -> float:
    for _ in range(num_calls // 10):
        call()
    times = []
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def show(name: str, value: float, unit: str = "us") -> None:
    print(f"{name:<58}{value:8.1f} {unit}")


def import_time() -> float:
    """Median of five new interpreters, less what an empty program takes."""

    def seconds(program: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True)
        return time.perf_counter() - start

    times = [seconds("import distmoe") - seconds("pass") for _ in range(5)]
    return statistics.median(times) * 1e3


def make_empty_operators():
    """distmoe_empty::routed_experts without gradients, ::saving with a formula for them."""
    library = torch.library.Library("distmoe_empty", "DEF")
    signature = str(operators.routed_experts_op._schema).removeprefix("distmoe::")
    for name in ("routed_experts", "saving"):
        library.define(signature.replace("routed_experts", name, 1))

    def forward(x, *_):
        return torch.empty_like(x), torch.empty(0, dtype=torch.int64)

    def saving(x, *_):
        return torch.empty_like(x), torch.empty(1, dtype=torch.int64)

    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1], *inputs[3:7])

    library.impl("routed_experts", forward, "CPU")
    library.impl("saving", saving, "CPU")
    torch.library.register_autograd(
        "distmoe_empty::saving", lambda ctx, *_: None, setup_context=setup_context, lib=library
    )
    return library


def cpp_times(program: str | None) -> dict[str, float]:
    if program is None:
        return {}
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: float(value) for name, value in map(str.split, lines.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", nargs="?", help="build/bin/bench_one_token_call")
    parser.add_argument("--calls", type=int, default=10_000)
    arguments = parser.parse_args()
    cpp = cpp_times(arguments.program)
    median = functools.partial(median_us, num_calls=arguments.calls)
    show("import distmoe", import_time(), "ms")

    config = distmoe.Config(
        max_tokens=1,
        hidden_dim=HIDDEN,
        intermediate_dim=INNER,
        top_k=TOP_K,
        num_experts=EXPERTS,
        max_moe_layers_per_activation_slot=1,
        activation_slot_capacity_factor=1.0,
    )
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    ids, scores = torch.tensor([[3, 5]]), torch.tensor([[0.6, 0.4]])
    w13 = torch.full((EXPERTS, 2 * INNER, HIDDEN), 1 / 128, dtype=torch.bfloat16)
    w2 = torch.full((EXPERTS, HIDDEN, INNER), 1 / 128, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    library = make_empty_operators()
    empty = torch.ops.distmoe_empty
    with distmoe.torch.create_context(config, device="cpu", num_threads=1) as context:
        core = context.core
        options = (None, None, [], 0.0, False, None, 0.0, None, context.number, False)
        given = (x, ids, scores, w13, w2, *options)

        plain = cpp.get("forward_us")
        of_core = median(lambda: distmoe.routed_experts(core, x, ids, scores, w13, w2, y))
        of_empty = median(lambda: empty.routed_experts(*given))
        of_torch = median(lambda: distmoe.torch.routed_experts(x, ids, scores, w13, w2, context))
        if plain is not None:
            show("forward, C++", plain)
        show("forward, distmoe.routed_experts", of_core)
        show("forward, empty operator of the same signature", of_empty)
        show("forward, distmoe.torch.routed_experts", of_torch)
        show("  over the C++ call (without it: over the core's)", of_torch - (plain or of_core))

        def save():
            core.discard(distmoe.saving_routed_experts(core, x, ids, scores, w13, w2, y))

        w13.requires_grad_(), w2.requires_grad_()
        plain = cpp.get("saving_forward_us")
        of_core = median(save)
        of_empty = median(lambda: empty.saving(*given))

        def forward():
            # The graph is dropped, as the empty operator's is: the slot is emptied for the next.
            distmoe.torch.routed_experts(x, ids, scores, w13, w2, context)
            core.reset()

        of_reset = median(core.reset)
        of_torch = median(forward) - of_reset
        if plain is not None:
            show("forward for a backward, C++", plain)
        show("forward for a backward, distmoe.saving_routed_experts", of_core)
        show("forward for a backward, empty operator", of_empty)
        show("forward for a backward, distmoe.torch.routed_experts", of_torch)
        show("  over the C++ call (without it: over the core's)", of_torch - (plain or of_core))
    del library


if __name__ == "__main__":
    main()
