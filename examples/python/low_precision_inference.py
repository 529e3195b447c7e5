# SPDX-License-Identifier: Apache-2.0
"""Serves one layer in every precision: bytes of its weights, distance from BF16, time of a call.

    python examples/python/low_precision_inference.py --tokens 64

The weights are prepared once, as a server does when it loads a model, and then serve every call.
"""

import argparse
import statistics
import time

import torch

import distmoe
import distmoe.torch

PRECISIONS = ("bf16", "mxfp8", "mxfp4", "nvfp4")


def bytes_of(weight: torch.Tensor | distmoe.torch.PreparedWeight) -> int:
    tensors = [weight] if isinstance(weight, torch.Tensor) else weight.tensors()
    return sum(tensor.nbytes for tensor in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--hidden-dim", type=int, default=256)
    parser.add_argument("--intermediate-dim", type=int, default=128)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    given = parser.parse_args()

    torch.manual_seed(0)
    width, depth, experts = given.hidden_dim, given.intermediate_dim, given.experts
    w13 = (torch.randn(experts, 2 * depth, width) * width**-0.5).bfloat16()
    w2 = (torch.randn(experts, width, depth) * depth**-0.5).bfloat16()
    x = torch.randn(given.tokens, width).bfloat16()
    logits = torch.randn(given.tokens, experts)
    scores, ids = torch.topk(torch.softmax(logits, dim=-1), given.top_k)

    exact = None
    for precision in PRECISIONS:
        config = distmoe.Config(
            max_tokens=given.tokens,
            hidden_dim=width,
            intermediate_dim=depth,
            top_k=given.top_k,
            num_experts=experts,
            max_moe_layers_per_activation_slot=1,
            precision=precision,
            inference=True,
        )
        weights = [w13, w2]
        if precision != "bf16":
            prepare = distmoe.torch.prepare_block_scaled_weight
            weights = [prepare(weight, precision, inference=True) for weight in weights]
        with distmoe.torch.create_context(config, device="cpu") as context:
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                y = distmoe.torch.routed_experts(x, ids, scores, *weights, context).double()
                seconds.append(time.perf_counter() - start)
        exact = y if exact is None else exact
        distance = float((y - exact).norm() / exact.norm())
        print(
            f"{precision:<6}{sum(map(bytes_of, weights)) / 2**20:8.2f} MiB of weights,"
            f" {distance:.4f} from BF16, {statistics.median(seconds) * 1e3:.3f} ms a call"
        )


if __name__ == "__main__":
    main()
