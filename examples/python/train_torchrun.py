# SPDX-License-Identifier: Apache-2.0
"""Trains a small MoE model over the ranks of torchrun, on CPUs or GPUs.

    torchrun --nproc-per-node 2 examples/python/train_torchrun.py

Every rank has tokens of its own and a part of the experts. Router and read-out are replicated:
their gradients are summed over the ranks. Those of the experts are whole already, because an
expert's owner sees the rows of all ranks.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import distmoe
import distmoe.torch

TOKENS, WIDTH, DEPTH, TOP_K, EXPERTS, LAYERS = 64, 32, 48, 2, 8, 2


class MoeBlock(nn.Module):
    def __init__(self, context: distmoe.torch.Context) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = distmoe.torch.RoutedExperts(context, accumulate_wgrad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = torch.topk(torch.softmax(self.router(x), dim=-1), TOP_K, dim=-1)
        return x + self.experts(x.bfloat16(), ids, scores).float()


class Model(nn.Module):
    def __init__(self, context: distmoe.torch.Context) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MoeBlock(context) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def make_config() -> distmoe.Config:
    return distmoe.Config(
        max_tokens=TOKENS,
        hidden_dim=WIDTH,
        intermediate_dim=DEPTH,
        top_k=TOP_K,
        num_experts=EXPERTS,
        max_moe_layers_per_activation_slot=LAYERS,
        activation_slot_capacity_factor=1.0,  # balanced routing recomputes nothing
        device_scratch_capacity_factor=float(dist.get_world_size()),  # any routing fits
    )


def train(model: nn.Module, device: torch.device, steps: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    experts = {id(p) for block in model.blocks for p in block.experts.parameters()}
    replicated = [p for p in model.parameters() if id(p) not in experts]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(TOKENS, WIDTH, generator=data)
        target = (x[:, 0] * x[:, 1]).to(device)
        loss = (model(x.to(device)) - target).square().sum() / (TOKENS * size)
        optimizer.zero_grad(set_to_none=False)  # gradients stay where they are
        loss.backward()
        for parameter in replicated:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:3d} loss {total.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=61)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    torch.manual_seed(0)  # replicated parameters are the same on every rank
    with distmoe.torch.create_context(make_config(), device=device) as context:
        model = Model(context).to(device)
        for block in model.blocks:
            torch.manual_seed(1 + dist.get_rank())  # experts are not
            block.experts.reset_parameters()
        train(model, device, options.steps)
        if dist.get_rank() == 0:
            print("rows of the last layer's experts:", context.last_call().rows_per_expert)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
