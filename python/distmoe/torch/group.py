# SPDX-License-Identifier: Apache-2.0
"""A communicator of the ranks of a torch.distributed group, over host memory."""

from __future__ import annotations

import collections
import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import distmoe

# Keeps these messages apart from the caller's own between the same ranks.
_TAG = 0x6D6F65
# No length: the rank that sends it will not come any more.
_GONE = -1
_WORDS = 400  # bytes of the reason that follows

if TYPE_CHECKING:  # a PyTorch without distributed has no Work
    _Transfer = tuple[int, dist.Work]


def _as_tensor(view: memoryview) -> torch.Tensor:
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # What is sent is read-only, and only read.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8)


# How many communicators were made of a group, by its name: all ranks of it count alike.
_num_made: collections.Counter[str] = collections.Counter()
# What a rank that gave up sent last, with the connections that it waits on until a peer looks; and
# those of a parent process, whose threads a child cannot end.
_kept: list[object] = []


def _connect(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroup | dist.Backend:
    """Connections of gloo between the ranks of `group` that nothing else uses.

    A call that times out breaks the connections that it used: those of the group stay whole. No
    dist.new_group(), whose name depends on the other groups that a rank has at the time.
    """
    if dist.get_backend(group) in ("mpi", "fake"):  # without a store to meet at
        return group
    name = group.group_name
    _num_made[name] += 1
    store = dist.distributed_c10d._get_default_store()
    place = dist.PrefixStore(f"distmoe/{name}/{_num_made[name]}", store)
    limit = timedelta(seconds=timeout)
    try:
        return dist.ProcessGroupGloo(place, group.rank(), group.size(), timeout=limit)
    except RuntimeError as error:
        raise distmoe.PeerLostError(
            f"the {group.size()} ranks of the group did not all come to make a communicator within"
            f" {timeout} s: {error}"
        ) from error


class GroupCommunicator(distmoe.Communicator):
    """The ranks of `group`, over connections of their own; making one is collective.

    They are gloo's, whatever the group's backend is; a group of MPI carries the messages itself.
    `timeout` (seconds) bounds the wait for the other ranks. `close()` ends the connections, which
    the peers hear of in their next exchange; dropping the communicator does as well.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        super().__init__()
        chosen = dist.group.WORLD if group is None else group
        if chosen is None:
            raise distmoe.InvalidArgumentError(
                "there is no process group: call torch.distributed.init_process_group() first"
            )
        self._rank, self._size = chosen.rank(), chosen.size()
        self._peers = [peer for peer in range(self._size) if peer != self._rank]
        self._reason: str | None = None
        self._has_told = False
        self._process = os.getpid()
        self._connections = _connect(chosen, timeout) if self._peers else None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "torch"

    def alltoallv(
        self, send: Sequence[memoryview], recv: Sequence[memoryview], timeout: float
    ) -> None:
        """Lengths cross first, so that ranks that disagree hear of it before a byte is lost."""
        sent, received = [_as_tensor(v) for v in send], [_as_tensor(v) for v in recv]
        received[self._rank].copy_(sent[self._rank])
        theirs = self._exchange_numbers([t.numel() for t in sent], timeout)
        for peer, place in enumerate(received):
            if peer != self._rank and theirs[peer] != place.numel():
                raise distmoe.PeerMismatchError(
                    f"rank {peer} sends {theirs[peer]} bytes to rank {self._rank}, which"
                    f" expects {place.numel()}"
                )
        receiving, sending = self._start(sent, received)
        self._wait(receiving + sending, timeout)

    def barrier(self, timeout: float) -> None:
        self._exchange_numbers([0] * self._size, timeout)

    def abort(self, reason: str) -> None:
        """Peers find no length, and the reason, where their next exchange begins.

        Also where this rank gave up for what it met in an exchange: who waits for it must not
        wait for its timeout.
        """
        if self._has_told or self._connections is None:
            return
        self._has_told = True
        if self._reason is None:
            self._reason = reason
        gone = torch.tensor([_GONE])
        words = torch.frombuffer(
            bytearray(reason.encode()[:_WORDS].ljust(_WORDS)), dtype=torch.uint8
        )
        # Not waited for: a peer may never look. What is sent must live as long as that.
        works = []
        for peer in self._peers:
            try:
                works += [self._send(gone, peer), self._send(words, peer)]
            except distmoe.PeerLostError:  # which needs no words; the others do
                continue
        _kept.append((self._connections, gone, words, works))

    def close(self) -> None:
        """Ends the connections of this rank. Not collective; what comes after is PeerLostError."""
        if self._reason is None:
            self._reason = "its communicator was closed"
        if os.getpid() == self._process:
            self._connections = None

    def __del__(self) -> None:
        connections = vars(self).get("_connections")
        if connections is not None and os.getpid() != self._process:
            _kept.append(connections)

    def _exchange_numbers(self, mine: list[int], timeout: float) -> list[int]:
        """A number to every rank and from it, with which everything begins."""
        theirs = torch.empty(self._size, dtype=torch.int64)
        own = torch.tensor(mine)
        receiving, sending = self._start(list(own.split(1)), list(theirs.split(1)))
        self._wait(receiving, timeout)
        for peer in self._peers:
            if int(theirs[peer]) == _GONE:
                # NOTE: gloo ends a send when the peer receives it, which that rank never will.
                _kept.append((self._connections, own, sending))
                self._reason = f"rank {peer} gave up: {self._words_of(peer, timeout)}"
                raise distmoe.PeerLostError(self._reason)
        self._wait(sending, timeout)
        return theirs.tolist()

    def _words_of(self, peer: int, timeout: float) -> str:
        words = torch.empty(_WORDS, dtype=torch.uint8)
        try:
            self._wait([(peer, self._receive(words, peer))], timeout)
        except distmoe.PeerLostError:
            return "it left before it had said why"
        return bytes(words.tolist()).decode(errors="replace").rstrip()

    def _send(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        try:
            return self._connections.send([tensor], peer, _TAG)
        except RuntimeError as error:
            raise self._left(peer, error) from error

    def _receive(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        try:
            return self._connections.recv([tensor], peer, _TAG)
        except RuntimeError as error:
            raise self._left(peer, error) from error

    def _start(
        self, sent: list[torch.Tensor], received: list[torch.Tensor]
    ) -> tuple[list[_Transfer], list[_Transfer]]:
        if self._reason is not None:
            raise distmoe.PeerLostError(f"this rank gave up: {self._reason}")
        receiving = [
            (peer, self._receive(received[peer], peer))
            for peer in self._peers
            if received[peer].numel() > 0
        ]
        sending = [
            (peer, self._send(sent[peer], peer)) for peer in self._peers if sent[peer].numel() > 0
        ]
        return receiving, sending

    def _wait(self, transfers: list[_Transfer], timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        for peer, work in transfers:
            try:
                work.wait(limit)
            except RuntimeError as error:
                if "onnection closed" in str(error) or "onnection reset" in str(error):
                    raise self._left(peer, error) from error
                self._reason = f"rank {peer} was lost"
                raise distmoe.PeerLostError(
                    f"rank {peer} did not answer within {timeout} s: {error}"
                ) from error

    def _left(self, peer: int, error: RuntimeError) -> distmoe.PeerLostError:
        self._reason = f"rank {peer} left: its context was closed, or its process ended ({error})"
        return distmoe.PeerLostError(self._reason)
