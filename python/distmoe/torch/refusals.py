# SPDX-License-Identifier: Apache-2.0
"""What one rank meets around its calls, told to its peers.

Arguments are looked at, and programs of the caller run, before the library is called. What is
raised there is raised on one rank alone, while its peers are in a call that waits for it. So the
rank takes its part in that call with a refusal: peers raise at once, with the reason, and the
context goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad
from torch.utils.checkpoint import _StopRecomputationError

import distmoe

_Result = TypeVar("_Result")


def refuse(
    core: distmoe.Context, error: Exception, *, stream: int = 0, is_backward: bool = False
) -> NoReturn:
    """Raises `error`, an Error of distmoe with the rank and the call, after telling the peers."""
    tell = distmoe.refuse_routed_experts_backward if is_backward else distmoe.refuse_routed_experts
    # NOTE: an exception holds the frames that it passed; frames that held it would live as long as
    # they like, with all their tensors and contexts.
    try:
        tell(core, error, stream=stream)
    except distmoe.Error as told:
        if isinstance(error, distmoe.Error):
            raise told.with_traceback(error.__traceback__) from None
        raise error from None
    finally:
        del error
    raise AssertionError("a refusal raises")


def refuse_unless_begun(
    core: distmoe.Context,
    num_begun: int,
    error: Exception,
    *,
    stream: int = 0,
    is_backward: bool = False,
) -> NoReturn:
    """Raises `error`; tells the peers where no call began since there were `num_begun`: a call that
    began has told them itself."""
    try:
        # NOTE: activation checkpointing stops a forward that it runs again by an exception.
        is_failure = not isinstance(error, _StopRecomputationError)
        if is_failure and core.num_begun_calls == num_begun:
            refuse(core, error, stream=stream, is_backward=is_backward)
        raise error
    finally:
        del error  # as in refuse()


def run_backward(core: distmoe.Context, stream: int, run: Callable[[], _Result]) -> _Result:
    """`run()`, a backward of `core` on `stream`; peers hear of what it meets before its call."""
    num_begun = core.num_begun_calls
    try:
        return run()
    except Exception as error:
        refuse_unless_begun(core, num_begun, error, stream=stream, is_backward=True)


def agree(
    core: distmoe.Context,
    failure: Exception | None,
    saved: distmoe.SavedForward | None = None,
    *,
    stream: int = 0,
) -> None:
    """Raises on every rank where any has a `failure`, met after a call; collective.

    What the call `saved` is discarded then, on every rank: no slot needs a reset.
    """
    try:
        distmoe.agree(core, failure)
    except distmoe.Error:
        if saved is not None and saved.is_live and not core.is_closed:
            core.discard(saved, stream=stream)
        if failure is None or isinstance(failure, distmoe.Error):
            raise
        raise failure from None
    finally:
        del failure  # as in refuse()


def is_traced(*arguments: object) -> bool:
    """Whether these are no arguments of a call that peers make too: fake tensors, or meta alone."""
    if torch.compiler.is_compiling() or detect_fake_mode(arguments) is not None:
        return True
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    return bool(tensors) and all(tensor.device.type == "meta" for tensor in tensors)


def check_types(legal: type | tuple[type, ...], **arguments: object) -> None:
    """TypeError for the first that is of none of the `legal` types."""
    for name, given in arguments.items():
        if not isinstance(given, legal):
            kinds = legal if isinstance(legal, tuple) else (legal,)
            texts = ["None" if kind is type(None) else _type_text(kind) for kind in kinds]
            raise TypeError(f"{name} is {type(given).__name__}; it must be {' or '.join(texts)}")


def check_strided(**arguments: object) -> None:
    """For the first tensor of another layout, which has no memory of rows."""
    for name, given in arguments.items():
        if isinstance(given, Tensor) and (given.layout != torch.strided or given.is_nested):
            kind = "nested" if given.is_nested else str(given.layout)
            raise distmoe.InvalidArgumentError(
                f"{name} is a {kind} tensor; the tensors of a call must be torch.strided"
            )


def _type_text(kind: type) -> str:
    if kind.__module__ == "builtins":
        return f"an {kind.__name__}" if kind is int else f"a {kind.__name__}"
    return f"a {kind.__module__}.{kind.__name__}"


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Forward-mode derivatives would be zero without a word."""
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise distmoe.UnsupportedError(
                f"a tensor {list(tensor.shape)} of the call has a tangent: distmoe has no"
                " forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad), backward()"
                " alone"
            )
