# SPDX-License-Identifier: Apache-2.0
"""One rank of test_torch_distributed.py: a case, a folder for its facts, cpu or cuda."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import distmoe
import distmoe.torch
from layer import Layer, digest
from torch_model import Model, expect_same_bits, train_config


def tell(**facts) -> None:
    """Leaves the facts of this rank for the test."""
    place = Path(sys.argv[2]) / f"{dist.get_rank()}.json"
    place.write_text(json.dumps(facts))


def train_over_the_group() -> None:
    with distmoe.torch.create_context(train_config(), device=sys.argv[3]) as context:
        assert (context.rank, context.size) == (dist.get_rank(), dist.get_world_size())
        model = Model(context, num_tokens=5 + context.rank)
        results = model.train()
        compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        expect_same_bits(model.train(compiled), results)
        if context.device.type == "cuda":
            expect_same_bits(replayed(model), results)
            context.check()
        tell(digest=digest(results))


def replayed(model: Model) -> dict[str, torch.Tensor]:
    """What the second replay of a captured step leaves."""
    graph, leaves = torch.cuda.CUDAGraph(), model.leaves
    with torch.cuda.graph(graph):
        y = model.forward(leaves)
        gradients = torch.autograd.grad(y, list(leaves.values()), model.coefficients)
    for _ in range(2):
        graph.replay()
    return dict(y=y.detach(), **dict(zip(leaves, gradients)))


def refuse_on_every_rank() -> None:
    with distmoe.torch.create_context(train_config(), device="cpu") as context:
        layer = Layer(context.config, seed=context.rank)
        given = dict(**layer.inputs(), **layer.local(context), context=context)
        if context.rank == 1:
            given["x"] = given["x"].float()
        try:
            distmoe.torch.routed_experts(**given)
        except distmoe.InvalidArgumentError as error:
            tell(words=str(error))
        given["x"] = layer.x
        assert distmoe.torch.routed_experts(**given).isfinite().all()


def lose_a_rank() -> None:
    config, store = train_config(timeout=2.0), dist.distributed_c10d._get_default_store()
    context = distmoe.torch.create_context(config, device="cpu")
    layer = Layer(config, seed=context.rank)
    if context.rank == 0:
        try:
            distmoe.torch.routed_experts(**layer.inputs(), **layer.local(context), context=context)
        except distmoe.PeerLostError as error:
            tell(words=str(error))
        store.set("done", "")
    else:
        store.wait(["done"], timedelta(seconds=60))  # alive, but it does not call


def main() -> None:
    if sys.argv[3] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
