#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Errors of distmoe's training step beside those of PyTorch BF16 layers, on random shapes.

Every layer goes through `distmoe run --train` as a checkpoint and an input file, and through two
PyTorch layers with automatic differentiation: `bf16` rounds after every operation, as a layer
written with BF16 tensors does; `fp32 glue` computes everything but the matrix products in FP32.
Their products are of BF16 operands with FP32 sums, as distmoe's. The error of a result is its
relative 2-norm distance to the same layer in FP64. Needs torch, numpy and safetensors:

    bench/torch_gradients.py build/bin/distmoe --shapes 20
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

RESULTS = ("y", "grad_x", "grad_scores", "grad_w13", "grad_w2")


def random_layer(generator):
    def pick(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    def noise(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    tokens, hidden, inner, experts = pick(1, 400), pick(4, 640), pick(4, 512), pick(2, 24)
    top_k = pick(1, min(experts, 6))
    ids = [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    return {
        "x": noise(tokens, hidden),
        "ids": torch.stack(ids).int(),
        "scores": torch.rand((tokens, top_k), generator=generator) / top_k,
        "dy": noise(tokens, hidden),
        "w13": noise(experts, 2 * inner, hidden, scale=hidden**-0.5),
        "w2": noise(experts, hidden, inner, scale=inner**-0.5),
    }


def torch_step(layer, product, glue):
    """Forward and backward with products in one type and everything between them in another."""
    def leaf(name, dtype):
        return layer[name].to(dtype, copy=True).requires_grad_()

    x = leaf("x", glue)
    scores = leaf("scores", torch.float64 if glue == torch.float64 else torch.float32)
    w13 = leaf("w13", product)
    w2 = leaf("w2", product)
    y = torch.zeros_like(x)
    for expert in range(w13.shape[0]):
        token, k = torch.where(layer["ids"] == expert)
        h1 = x[token].to(product) @ w13[expert].T
        gate, up = h1.to(glue).chunk(2, dim=1)
        h3 = (F.silu(gate) * up).to(product) @ w2[expert].T
        y = y.index_add(0, token, h3.to(glue) * scores[token, k, None].to(glue))
    y = y.to(product)
    y.backward(layer["dy"].to(product))
    gradients = (x.grad.to(product), scores.grad, w13.grad, w2.grad)
    return dict(zip(RESULTS, (y.detach(), *gradients)))


def distmoe_step(layer, program, folder, arguments):
    experts, double_inner, hidden = layer["w13"].shape
    inner = double_inner // 2
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_local_experts": experts,
        "num_experts_per_tok": layer["ids"].shape[1],
        "num_hidden_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = {}
    for expert in range(experts):
        name = f"model.layers.0.mlp.experts.{expert}."
        weights[name + "gate_proj.weight"] = layer["w13"][expert, :inner].contiguous()
        weights[name + "up_proj.weight"] = layer["w13"][expert, inner:].contiguous()
        weights[name + "down_proj.weight"] = layer["w2"][expert].contiguous()
    save_file(weights, folder / "model.safetensors")
    tensors = {
        "layer0.x": layer["x"],
        "layer0.topk_ids": layer["ids"],
        "layer0.topk_scores": layer["scores"],
        "layer0.dy": layer["dy"],
    }
    source, result = folder / "input.safetensors", folder / "output.safetensors"
    save_file(tensors, source)
    command = [program, "run", "--train", "--checkpoint", folder, "--layer", "0"]
    command += ["--input", source, "--output", result, *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return load_file(result)


def relative_errors(actual, exact):
    def error(name):
        return float((actual[name].double() - exact[name]).norm() / exact[name].norm())

    return {name: error(name) for name in RESULTS}


def ratio_of(error, peer_error):
    if peer_error == 0:
        return 1.0 if error == 0 else float("inf")
    return error / peer_error


def compare(layer, program, arguments):
    """Errors of distmoe, and of each PyTorch layer by its name."""
    exact = torch_step(layer, torch.float64, torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        actual = distmoe_step(layer, program, pathlib.Path(folder), arguments)
    peers = {
        "bf16": torch_step(layer, torch.bfloat16, torch.bfloat16),
        "fp32 glue": torch_step(layer, torch.bfloat16, torch.float32),
    }
    errors = {peer: relative_errors(values, exact) for peer, values in peers.items()}
    return relative_errors(actual, exact), errors


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", help="the distmoe command")
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--options", default="", help="more options of `distmoe run`, one string")
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    worst = {}
    for index in range(options.shapes):
        layer = random_layer(generator)
        mine, peers = compare(layer, options.program, options.options.split())
        for name in RESULTS:
            for peer, errors in peers.items():
                found = (ratio_of(mine[name], errors[name]), mine[name], errors[name], index)
                worst[name, peer] = max(worst.get((name, peer), found), found)
        (tokens, hidden), (experts, _, inner) = layer["x"].shape, layer["w2"].shape
        shape = f"T={tokens} D={hidden} F={inner} E={experts} K={layer['ids'].shape[1]}"
        errors = (f"{name} {mine[name]:.2e}" for name in RESULTS)
        print(f"{index:3} {shape:34}", *errors, flush=True)
    print(f"\nworst of {options.shapes} shapes, PyTorch {torch.__version__}")
    print(f"{'':14}{'PyTorch layer':14}{'ratio':>8}{'distmoe':>12}{'PyTorch':>12}{'shape':>7}")
    for (name, peer), (ratio, error, peer_error, index) in worst.items():
        print(f"{name:14}{peer:14}{ratio:8.3f}{error:12.3e}{peer_error:12.3e}{index:7}")


if __name__ == "__main__":
    main()
