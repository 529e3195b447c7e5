# SPDX-License-Identifier: Apache-2.0
"""A communicator over a torch.distributed group whose backend carries host memory, such as gloo."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

import distmoe

# Keeps these messages apart from the caller's own between the same ranks.
_TAG = 0x6D6F65


def _as_tensor(view: memoryview) -> torch.Tensor:
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    with warnings.catch_warnings():
        # What is sent is read-only, and only read.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=torch.uint8)


class GroupCommunicator(distmoe.Communicator):
    """The ranks of `group`, over point-to-point messages of the group itself."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        chosen = dist.group.WORLD if group is None else group
        if chosen is None:
            raise distmoe.InvalidArgumentError(
                "there is no process group: call torch.distributed.init_process_group() first"
            )
        self._group: dist.ProcessGroup = chosen
        self._rank, self._size = self._group.rank(), self._group.size()
        self._reason: str | None = None

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
        lengths = torch.tensor([t.numel() for t in sent])
        theirs = torch.empty(self._size, dtype=torch.int64)
        self._exchange(list(lengths.split(1)), list(theirs.split(1)), timeout)
        for peer, place in enumerate(received):
            if peer != self._rank and int(theirs[peer]) != place.numel():
                raise distmoe.PeerMismatchError(
                    f"rank {peer} sends {int(theirs[peer])} bytes to rank {self._rank}, which"
                    f" expects {place.numel()}"
                )
        self._exchange(sent, received, timeout)

    def barrier(self, timeout: float) -> None:
        nothing = [torch.zeros(1, dtype=torch.uint8) for _ in range(self._size)]
        self._exchange(nothing, [torch.empty_like(t) for t in nothing], timeout)

    def abort(self, reason: str) -> None:
        """Peers learn of it by their timeout: a group has no message for it."""
        self._reason = reason

    def _exchange(
        self, sent: list[torch.Tensor], received: list[torch.Tensor], timeout: float
    ) -> None:
        if self._reason is not None:
            raise distmoe.PeerLostError(f"this rank gave up: {self._reason}")
        peers = [peer for peer in range(self._size) if peer != self._rank]
        works = [
            (peer, self._group.recv([received[peer]], peer, _TAG))
            for peer in peers
            if received[peer].numel() > 0
        ]
        works += [
            (peer, self._group.send([sent[peer]], peer, _TAG))
            for peer in peers
            if sent[peer].numel() > 0
        ]
        limit = timedelta(seconds=timeout)
        for peer, work in works:
            try:
                work.wait(limit)
            except RuntimeError as error:
                self._reason = f"rank {peer} was lost"
                raise distmoe.PeerLostError(
                    f"rank {peer} did not answer within {timeout} s: {error}"
                ) from error
