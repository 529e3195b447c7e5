# SPDX-License-Identifier: Apache-2.0
"""PyTorch gives the bits that the C++ program writes, for a layer of a real checkpoint."""

import json
import subprocess

import pytest
import torch

import distmoe
import distmoe.torch
from layer import bits, same_bits

TYPES = {
    "U8": torch.uint8,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
}
EXPERTS = 16


def read_safetensors(path) -> dict[str, torch.Tensor]:
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, facts in header.items():
        first, last = (start + offset for offset in facts["data_offsets"])
        flat = torch.frombuffer(data[first:last], dtype=torch.uint8).view(TYPES[facts["dtype"]])
        tensors[name] = flat.view(facts["shape"])
    return tensors


@pytest.fixture(scope="module")
def written(root, tmp_path_factory):
    """What `distmoe run --train` writes, and the tensors that it read."""
    place = tmp_path_factory.mktemp("command") / "gradients.safetensors"
    folder = root / "testdata/qwen3moe"
    command = [str(root / "build/bin/distmoe"), *"run --layer 0 --train --slot-factor 1".split()]
    command += ["--checkpoint", str(folder), "--output", str(place)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    results = read_safetensors(place)
    model = read_safetensors(folder / "model.safetensors")
    given = read_safetensors(folder / "routed_experts.safetensors")

    def experts(name):
        layer = "model.layers.0.mlp.experts"
        return torch.stack([model[f"{layer}.{e}.{name}.weight"] for e in range(EXPERTS)])

    w13 = torch.cat([experts("gate_proj"), experts("up_proj")], dim=1)
    return results, given, w13, experts("down_proj")


def test_pytorch_gives_the_bits_of_the_command(written):
    results, given, w13, w2 = written
    x, scores = given["layer0.x"].clone(), given["layer0.topk_scores"].clone()
    ids = given["layer0.topk_ids"]
    leaves = dict(x=x, scores=scores, w13=w13.clone(), w2=w2.clone())
    for leaf in leaves.values():
        leaf.requires_grad_()
    config = distmoe.Config(
        max_tokens=len(x),
        hidden_dim=x.shape[1],
        intermediate_dim=w2.shape[2],
        top_k=ids.shape[1],
        num_experts=EXPERTS,
        max_moe_layers_per_activation_slot=1,
    )
    with distmoe.torch.create_context(config, device="cpu") as context:
        y = distmoe.torch.routed_experts(x, ids, scores, leaves["w13"], leaves["w2"], context)
        y.backward(results["dy"])
    assert same_bits(y, results["y"])
    for name, leaf in leaves.items():
        assert bits(leaf.grad).any()
        assert same_bits(leaf.grad, results[f"grad_{name}"]), name
