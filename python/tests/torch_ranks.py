# SPDX-License-Identifier: Apache-2.0
"""One rank of test_torch_distributed.py: a case, a folder for its facts, cpu or cuda."""

import copy
import functools
import gc
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distmoe
import distmoe.torch
from layer import Layer, digest, same_bits
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


class SmallModel(nn.Module):
    """A router that ranks share and experts that they divide, as docs/python.md wraps them."""

    def __init__(self, context: distmoe.torch.Context) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.router = nn.Linear(32, 7, bias=False)
        self.experts = distmoe.torch.RoutedExperts(context)
        layer = Layer(context.config)
        for name, weight in layer.local(context).items():
            getattr(self.experts, name).data.copy_(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, ids = torch.topk(torch.softmax(self.router(x.float()), dim=-1), 3, dim=-1)
        return self.experts(x, ids, scores).float()


def compare_gradients(plain: SmallModel, model: SmallModel, wrapped: nn.Module) -> None:
    """Experts have the gradients that they have without a wrapper, the router their mean."""
    x = Layer(model.experts.context.config, seed=dist.get_rank()).x
    for each in (plain, wrapped):
        each(x).square().sum().backward()
    dist.all_reduce(plain.router.weight.grad)
    plain.router.weight.grad /= dist.get_world_size()
    for name in ("w13", "w2"):
        ours, theirs = getattr(model.experts, name), getattr(plain.experts, name)
        assert same_bits(ours, theirs) and same_bits(ours.grad, theirs.grad), name
        assert ours.grad.any(), name
    gradient = model.router.weight.grad
    if hasattr(gradient, "full_tensor"):
        gradient = gradient.full_tensor()
    torch.testing.assert_close(gradient, plain.router.weight.grad)
    tell(experts=digest(dict(w2=model.experts.w2)))


def train_under_ddp() -> None:
    with distmoe.torch.create_context(train_config(), device="cpu") as context:
        model = SmallModel(context)
        plain = copy.deepcopy(model)
        names = [f"experts.{name}" for name, _ in model.experts.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        compare_gradients(plain, model, DistributedDataParallel(model))


def train_under_fsdp() -> None:
    with distmoe.torch.create_context(train_config(), device="cpu") as context:
        model = SmallModel(context)
        plain = copy.deepcopy(model)
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, ignored_params=set(model.experts.parameters()))
        compare_gradients(plain, model, model)


def fail_alone() -> None:
    """What only Python sees, on one rank."""
    with distmoe.torch.create_context(train_config(), device="cpu") as context:
        layer = Layer(context.config, seed=context.rank)
        given = dict(**layer.inputs(), **layer.local(context), context=context)
        try:
            distmoe.torch.routed_experts(**given | (dict(x=[1.0]) if context.rank == 1 else {}))
        except (distmoe.Error, TypeError) as error:
            tell(kind=type(error).__name__, words=str(error))
        assert distmoe.torch.routed_experts(**given).isfinite().all()


def reach_nccl_from_a_subgroup() -> None:
    """How a group's ranks come to NCCL, up to the library's own part of it, which needs GPUs."""
    group, asked = dist.new_group([1, 2]), {}

    def make_nccl_communicator(host, device, timeout):
        asked.update(device=device, timeout=timeout, rank=host.rank(), size=host.size())
        host.barrier(10.0)  # the hosts of this group alone
        return host

    if dist.get_rank() > 0:
        torch.cuda.is_available = lambda: True
        distmoe.make_nccl_communicator = make_nccl_communicator
        device = torch.device("cuda", dist.get_rank() + 4)
        made, own = distmoe.torch.context._communicator(group, device, 7.0)
        tell(**asked, is_group=isinstance(made, distmoe.torch.GroupCommunicator) and made is own)


def train_over_nccl_alone() -> None:
    """A communicator of NCCL of one rank, which create_context() leaves out."""
    host = distmoe.torch.GroupCommunicator()
    communicator = distmoe.make_nccl_communicator(host, torch.cuda.current_device())
    with distmoe.torch.create_context(train_config(), device="cuda") as context:
        expected = Model(context).train()
    with distmoe.torch.create_context(train_config(), communicator, device="cuda") as context:
        model = Model(context)
        expect_same_bits(model.train(), expected)
        expect_same_bits(replayed(model), expected)
        context.check()
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)  # NCCL of PyTorch beside it
    tell(name=communicator.name(), sum=one.item())


def share_a_gpu() -> None:
    """Processes on one GPU: NCCL refuses them, and the group goes on."""
    try:
        distmoe.torch.create_context(train_config(), device="cuda:0")
    except distmoe.UnsupportedError as error:
        words = str(error)
    with distmoe.torch.create_context(train_config(), device="cpu") as context:
        Model(context, num_tokens=5 + context.rank).train()
    tell(words=words)


def give_up_alone() -> None:
    """Something that no refusal tells: a rank that leaves the group between calls."""
    communicator = distmoe.torch.GroupCommunicator()
    with distmoe.torch.create_context(train_config(), communicator, device="cpu") as context:
        layer = Layer(context.config, seed=context.rank)
        given = dict(**layer.inputs(), **layer.local(context), context=context)
        distmoe.torch.routed_experts(**given)
        if context.rank == 1:  # alive, but it will not come
            communicator.abort("out of luck, " + "and so on " * 100)
        for kind in (distmoe.PeerLostError, distmoe.ClosedError):
            try:
                distmoe.torch.routed_experts(**given)
            except kind as error:
                tell(kind=type(error).__name__, words=str(error))
        leave_together()


def leave_together() -> None:
    """A rank that ends takes its connections along, and what it says last."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done{dist.get_rank()}", "")
    everyone = [f"done{rank}" for rank in range(dist.get_world_size())]
    store.wait(everyone, timedelta(seconds=60))


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
    total = torch.ones(1)
    dist.all_reduce(total)  # the group of the caller is as it was
    assert total.item() == dist.get_world_size()


def close_alone() -> None:
    """A rank that closes its context while its peers go on, which have others of the same group."""
    contexts = [distmoe.torch.create_context(train_config(), device="cpu") for _ in range(2)]
    layer = Layer(contexts[0].config, seed=dist.get_rank())
    calls = [
        functools.partial(
            distmoe.torch.routed_experts, **layer.inputs(), **layer.local(each), context=each
        )
        for each in contexts
    ]
    y = calls[0]()
    drop_in_a_child(contexts, calls)
    assert same_bits(calls[1](), y)
    began = time.monotonic()
    if contexts[0].rank == 1:
        contexts[0].close()
    try:
        calls[0]()
    except distmoe.Error as error:
        tell(kind=type(error).__name__, words=str(error), seconds=time.monotonic() - began)
    dist.barrier()  # a peer that heard of it and closes too would be the one that left
    contexts[0].close()
    again = distmoe.torch.create_context(train_config(), device="cpu")  # of the group, once more
    assert same_bits(distmoe.torch.routed_experts(**calls[0].keywords | dict(context=again)), y)
    assert same_bits(calls[1](), y)


def drop_in_a_child(*contexts: list) -> None:
    """A forked child has the connections, but not the threads that serve them."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        for each in contexts:
            each.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def wait_for_a_late_rank() -> None:
    """Making a context is collective: who comes alone hears of it within the timeout."""
    if dist.get_rank() == 0:
        try:
            distmoe.torch.create_context(train_config(timeout=1.0), device="cpu")
        except distmoe.PeerLostError as error:
            tell(words=str(error))
    dist.barrier()


def main() -> None:
    if sys.argv[3] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
