# SPDX-License-Identifier: Apache-2.0
"""Contexts over a gloo group under torchrun: the bits of threads, and errors on every rank."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from devices import needs_gpu, needs_two_gpus

import distmoe
import distmoe.torch
from layer import digest
from torch_model import Model, train_config

FOLDER = Path(__file__).resolve().parent


def torchrun(*arguments: str, size: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=FOLDER)


def facts_of_ranks(case: str, folder: Path, *, size: int = 2, device: str = "cpu") -> list[dict]:
    """What the ranks that had something to tell left, in their order."""
    done = torchrun(str(FOLDER / "torch_ranks.py"), case, str(folder), device, size=size)
    assert done.returncode == 0, done.stderr
    return [json.loads(place.read_text()) for place in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize(
    ("device", "size"), [("cpu", 3), pytest.param("cuda", 2, marks=needs_two_gpus)]
)
def test_a_group_gives_the_bits_of_threads(tmp_path, device, size):
    expected = {}

    def body(communicator):
        place = device if device == "cpu" else f"cuda:{communicator.rank()}"
        with distmoe.torch.create_context(train_config(), communicator, device=place) as context:
            results = Model(context, num_tokens=5 + context.rank).train()
            expected[context.rank] = digest(results)

    threads = [
        threading.Thread(target=body, args=(communicator,))
        for communicator in distmoe.make_thread_group(size)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    facts = facts_of_ranks("train_over_the_group", tmp_path, size=size, device=device)
    assert [fact["digest"] for fact in facts] == [expected[rank] for rank in range(size)]


@needs_gpu
def test_a_rank_over_nccl_alone_has_the_bits_of_one_without_on_a_gpu(tmp_path):
    (fact,) = facts_of_ranks("train_over_nccl_alone", tmp_path, size=1, device="cuda")
    assert fact == dict(name="nccl", sum=1.0)


@needs_gpu
def test_processes_that_share_a_gpu_are_refused(tmp_path):
    facts = facts_of_ranks("share_a_gpu", tmp_path, device="cuda")
    assert len(facts) == 2
    assert all("ranks 0 and 1 use the same GPU" in fact["words"] for fact in facts)


def test_a_refusal_is_raised_on_every_rank(tmp_path):
    facts = facts_of_ranks("refuse_on_every_rank", tmp_path)
    assert len(facts) == 2
    assert all("rank 1" in fact["words"] for fact in facts)
    assert all("x must be bf16, got f32 [11, 32]" in fact["words"] for fact in facts)


def test_a_rank_that_does_not_come_is_lost(tmp_path):
    (fact,) = facts_of_ranks("lose_a_rank", tmp_path)
    assert "rank 1" in fact["words"] and "2.0 s" in fact["words"]


@pytest.mark.parametrize("case", ["train_under_ddp", "train_under_fsdp"])
def test_data_parallel_wrappers_leave_the_experts_alone(tmp_path, case):
    facts = facts_of_ranks(case, tmp_path)
    assert len(facts) == 2 and facts[0]["experts"] != facts[1]["experts"]


def test_a_lone_failure_is_told_over_the_group(tmp_path):
    facts = facts_of_ranks("fail_alone", tmp_path)
    assert [fact["kind"] for fact in facts] == ["InvalidArgumentError", "TypeError"]
    assert all("x is list; it must be a torch.Tensor" in fact["words"] for fact in facts)


def test_a_group_of_gpus_meets_over_gloo_and_asks_for_nccl(tmp_path):
    facts = facts_of_ranks("reach_nccl_from_a_subgroup", tmp_path, size=3)
    assert facts == [
        dict(device=rank + 4, timeout=7.0, rank=rank - 1, size=2, is_group=True) for rank in (1, 2)
    ]


def test_a_rank_that_gives_up_tells_its_peers_why(tmp_path):
    facts = facts_of_ranks("give_up_alone", tmp_path, size=3)
    assert [fact["kind"] for fact in facts] == ["ClosedError"] * 3
    assert all("gave up: out of luck, and so on" in fact["words"] for fact in facts)


def test_a_rank_that_closes_its_context_tells_its_peers(tmp_path):
    facts = facts_of_ranks("close_alone", tmp_path, size=3)
    assert [fact["kind"] for fact in facts] == ["PeerLostError", "ClosedError", "PeerLostError"]
    assert all("rank 1 left: its context was closed" in facts[rank]["words"] for rank in (0, 2))
    assert all(fact["seconds"] < 10 for fact in facts)  # of a timeout of 20


def test_a_context_is_made_by_all_ranks(tmp_path):
    (fact,) = facts_of_ranks("wait_for_a_late_rank", tmp_path)
    assert "the 2 ranks of the group did not all come" in fact["words"]
    assert "within 1.0 s" in fact["words"]
