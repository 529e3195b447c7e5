# SPDX-License-Identifier: Apache-2.0
"""Engines of the library and communicators that Python implements give the same bits."""

import json
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import distmoe
from layer import Layer, digest, make_config, run_training, same_bits


class QueueCommunicator(distmoe.Communicator):
    """Ranks that are threads, over Python's queues."""

    def __init__(self, rank, queues):
        super().__init__()
        self.own_rank, self.queues = rank, queues

    def rank(self):
        return self.own_rank

    def size(self):
        return len(self.queues)

    def name(self):
        return "queues"

    def alltoallv(self, send, recv, timeout):
        for peer, data in enumerate(send):
            self.queues[self.own_rank][peer].put(bytes(data))
        for peer, place in enumerate(recv):
            try:
                place[:] = self.queues[peer][self.own_rank].get(timeout=timeout)
            except queue.Empty:
                raise distmoe.PeerLostError(f"rank {peer} did not come") from None

    def barrier(self, timeout):
        nothing = [b""] * self.size()
        self.alltoallv(nothing, [memoryview(bytearray()) for _ in nothing], timeout)

    def abort(self, reason):
        pass


def run_ranks(communicators, body):
    results = [None] * len(communicators)

    def run(rank):
        try:
            results[rank] = body(communicators[rank], rank)
        except Exception as error:  # compared by the test
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(communicators))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return results


def train(config):
    def body(communicator, rank):
        with distmoe.Context.create(config, communicator) as context:
            return run_training(context, Layer(config, num_tokens=4 + rank, seed=rank))

    return body


def make_queue_group(size):
    queues = [[queue.Queue() for _ in range(size)] for _ in range(size)]
    return [QueueCommunicator(rank, queues) for rank in range(size)]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_tcp_group(size):
    port = free_port()

    def connect(_, rank):
        group = distmoe.TcpGroup(rank, size, "127.0.0.1", port, "test")
        return distmoe.make_tcp_communicator(group, timeout=20.0)

    return run_ranks([None] * size, connect)


@pytest.mark.parametrize("make_group", [make_queue_group, make_tcp_group])
def test_every_engine_gives_the_same_bits(make_group):
    config = make_config()
    expected = run_ranks(distmoe.make_thread_group(3), train(config))
    results = run_ranks(make_group(3), train(config))
    for rank in range(3):
        for name, value in expected[rank].items():
            assert same_bits(results[rank][name], value), name


def test_processes_under_mpirun_give_the_same_bits(tmp_path):
    expected = run_ranks(distmoe.make_thread_group(2), train(make_config()))
    program = Path(__file__).resolve().parent / "mpi_rank.py"
    command = "mpirun --allow-run-as-root --oversubscribe -n 2".split()
    command += [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts == digest(expected[rank])


def test_facts_of_a_group():
    communicators = distmoe.make_thread_group(2)
    assert [(c.rank(), c.size(), c.name()) for c in communicators] == [
        (0, 2, "threads"),
        (1, 2, "threads"),
    ]


def test_a_peer_that_does_not_come_is_lost():
    config = make_config(timeout=2.0)
    (error, _) = run_ranks(
        make_queue_group(2),
        lambda communicator, rank: rank == 0 and distmoe.Context.create(config, communicator),
    )
    assert isinstance(error, distmoe.PeerLostError)
    assert "rank 1 did not come" in str(error)


class Broken(QueueCommunicator):
    def alltoallv(self, send, recv, timeout):
        raise KeyError("no such peer")


def test_what_python_raises_is_told():
    with pytest.raises(distmoe.InternalError, match="alltoallv raised KeyError: 'no such peer'"):
        distmoe.Context.create(make_config(), Broken(0, [[], []]))


class Nameless(distmoe.Communicator):
    def rank(self):
        return "first"


def test_a_communicator_without_a_rank_is_refused():
    with pytest.raises((TypeError, RuntimeError)):
        distmoe.Context.create(make_config(), Nameless())


def test_the_lowest_failing_rank_is_raised():
    def body(communicator):
        if communicator.rank() == 1:
            raise distmoe.UnsupportedError("not on rank 1")
        communicator.barrier(20.0)

    with pytest.raises(distmoe.UnsupportedError, match="not on rank 1"):
        distmoe.run_thread_group(3, body)


def test_torchrun_names_what_is_missing(monkeypatch):
    variables = dict(RANK="1", WORLD_SIZE="3", MASTER_ADDR="there", MASTER_PORT="29500")
    for name, value in dict(**variables, TORCHELASTIC_RUN_ID="job").items():
        monkeypatch.setenv(name, value)
    group = distmoe.torchrun_group()
    assert (group.rank, group.size, group.host, group.port) == (1, 3, "there", 29501)
    for name in variables:
        with monkeypatch.context() as one_less:
            one_less.delenv(name)
            with pytest.raises(ValueError, match=f"{name} is not set; torchrun sets it"):
                distmoe.torchrun_group()


def without(name):
    """A transport of one rank that lacks one method."""
    methods = dict(rank=lambda _: 0, size=lambda _: 1, name=lambda _: "lacking")
    methods.update(dict.fromkeys(("alltoallv", "barrier", "abort"), lambda *_: None))
    del methods[name]
    return type("Lacking", (distmoe.Communicator,), methods)()


class Forgetful(distmoe.Communicator):
    def __init__(self):
        pass


class Counting(QueueCommunicator):
    def size(self):
        return "two"


@pytest.mark.parametrize(
    ("communicator", "words"),
    [
        *[
            (without(name), rf"Lacking has no {name}\(\); a Communicator implements rank, size")
            for name in ("rank", "size", "name", "alltoallv", "barrier", "abort")
        ],
        (Counting(0, [[]]), r"size\(\) of .*Counting is 'two'; it must be an integer"),
        (3, "communicator is int; it must be a distmoe.Communicator or None"),
    ],
)
def test_a_transport_that_is_none_is_refused(communicator, words):
    with pytest.raises(TypeError, match=words):
        distmoe.Context.create(make_config(), communicator)


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_a_transport_without_its_base_is_refused():
    with pytest.raises(TypeError, match=r"Forgetful, whose __init__ must call super\(\)"):
        distmoe.Context.create(make_config(), Forgetful())
