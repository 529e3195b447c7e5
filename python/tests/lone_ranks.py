# SPDX-License-Identifier: Apache-2.0
"""Ranks of which one does something wrong, and what each of them raises."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import distmoe

WRONG_RANK = 1


def errors_of_ranks(
    body: Callable[[distmoe.Communicator, bool, Callable], None], size: int = 2
) -> list[Exception]:
    """What every rank raised in the one call that its `body(communicator, is_wrong, attempt)` hands
    to `attempt`."""
    errors: dict[int, Exception] = {}

    def run(communicator):
        rank = communicator.rank()

        def attempt(call: Callable, *arguments: object) -> None:
            with pytest.raises(Exception) as raised:
                call(*arguments)
            errors[rank] = raised.value.with_traceback(None)  # whose frames hold what failed

        body(communicator, rank == WRONG_RANK, attempt)

    distmoe.run_thread_group(size, run)
    return [errors[rank] for rank in range(size)]


def expect_told(errors: list[Exception], kind: type[Exception], words: str) -> None:
    """The wrong rank has its own exception, every other one an error that names it and says why."""
    for rank, error in enumerate(errors):
        assert words in str(error), (rank, error)
        if rank == WRONG_RANK:
            assert type(error) is kind, error
            continue
        assert isinstance(error, distmoe.Error) and f"rank {WRONG_RANK}" in str(error), error
        assert not isinstance(error, (distmoe.PeerLostError, distmoe.PeerMismatchError)), error
