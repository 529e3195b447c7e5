# SPDX-License-Identifier: Apache-2.0
"""Contexts as operators see them: by a number that a graph can hold."""

from __future__ import annotations

import itertools
import weakref
from typing import NoReturn, cast

import torch
import torch.distributed

import distmoe
from distmoe.torch.group import GroupCommunicator
from distmoe.torch.refusals import check_types

_numbers = itertools.count(1)
_contexts: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()


def wgrad_dtype_of(config: distmoe.Config) -> torch.dtype | None:
    """Of weights' gradients; None: that of the weight."""
    return {"bf16": torch.bfloat16, "fp32": torch.float32}.get(config.wgrad_dtype or "")


class Context:
    """A distmoe.Context for PyTorch's operators; made by `create_context`.

    `core` is the distmoe.Context; what it offers is reached through it, and the parts that training
    needs are repeated here. Used by one thread at a time.
    """

    def __init__(
        self,
        core: distmoe.Context,
        device: torch.device,
        own_communicator: GroupCommunicator | None = None,
    ) -> None:
        # Plain attributes: a compiled graph guards on them instead of calling into C++.
        self.core = core
        self.device = device
        self.config = cast(distmoe.Config, core.config)
        self.inference = self.config.inference
        self.wgrad_dtype = wgrad_dtype_of(self.config)
        self.num_local_experts = core.num_local_experts
        self.first_expert = core.first_expert
        self._own_communicator = own_communicator
        self.number = next(_numbers)
        _contexts[self.number] = self

    @property
    def rank(self) -> int:
        return self.core.rank

    @property
    def size(self) -> int:
        return self.core.size

    @property
    def memory_plan(self) -> distmoe.MemoryPlan:
        return self.core.memory_plan

    @property
    def is_closed(self) -> bool:
        return self.core.is_closed

    def select_activation_slot(self, slot: int, num_moe_layers: int) -> None:
        self.core.select_activation_slot(slot, num_moe_layers)

    def reset(self) -> None:
        """After an aborted schedule or a dropped graph: empties all slots. All ranks reset."""
        self.core.reset()

    def check(self) -> None:
        """Raises the first fault that a device found since the last check."""
        self.core.check()

    def last_call(self) -> distmoe.CallStatistics:
        return self.core.last_call()

    def close(self) -> None:
        """Frees everything. Idempotent, not collective; a peer that calls on gets PeerLostError."""
        self.core.close()
        if self._own_communicator is not None:
            self._own_communicator.close()

    def __deepcopy__(self, memo: object) -> Context:
        """A copied module calls the same context: its memory belongs to one group of ranks."""
        return self

    def __copy__(self) -> Context:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "cannot pickle a distmoe.torch.Context: it holds memory, threads and peers of one"
            " process; save the state_dict() of modules, and create another context of its config"
        )

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"rank {self.rank} of {self.size}"
        return f"<distmoe.torch.Context {self.number}, {self.device}, {state}>"


def context_of(number: int) -> Context:
    """The context that a graph names."""
    context = _contexts.get(number)
    if context is None:
        raise distmoe.ClosedError(f"distmoe.torch context {number} does not exist any more")
    return context


def _communicator(
    group: object, device: torch.device, timeout: float
) -> tuple[distmoe.Communicator | None, GroupCommunicator | None]:
    """What a context calls over, and what of it is closed with the context."""
    if group is None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return None, None
        group = torch.distributed.group.WORLD
    if isinstance(group, distmoe.Communicator):
        return group, None
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"group is {type(group).__name__}; it must be a torch.distributed process group, a"
            " distmoe.Communicator or None"
        )
    has_gpus = _has_gpus(device)  # without GPUs the library says on every rank why there is none
    if has_gpus and group.size() == 1:
        return None, None
    host = GroupCommunicator(group, timeout)
    if not has_gpus:
        return host, host
    return distmoe.make_nccl_communicator(host, device.index, timeout), host


def _has_gpus(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _device_of(given: torch.device | str | int | None) -> torch.device:
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(given, int) and not isinstance(given, bool):
        given = f"cuda:{given}"  # a number alone asks PyTorch for a GPU that may not be there
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise distmoe.InvalidArgumentError(f"device is {given!r}: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise distmoe.InvalidArgumentError(f"device is {device}; legal are cpu and cuda")
    if _has_gpus(device) and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def create_context(
    config: distmoe.Config,
    group: torch.distributed.ProcessGroup | distmoe.Communicator | None = None,
    *,
    device: torch.device | str | int | None = None,
    num_threads: int = 0,
) -> Context:
    """Makes the context of this rank. Collective over `group`.

    Without a group: the default one of torch.distributed where that is initialised, one rank
    otherwise. Without a device: the current CUDA device where PyTorch has one, else the CPU. On the
    CPU calls travel over connections of gloo that are the context's own, on GPUs over NCCL's
    symmetric windows. `num_threads`: worker threads of a rank on the CPU, 0 for its share of the
    cores.
    """
    check_types(distmoe.Config, config=config)
    check_types(int, num_threads=num_threads)
    chosen = _device_of(device)
    # The library would learn of it from an allocation that ends the capture.
    if _has_gpus(chosen) and torch.cuda.is_current_stream_capturing():
        raise distmoe.UnsupportedError(
            "the current stream is being captured into a CUDA graph: a context allocates memory "
            "and is created before the capture begins"
        )
    communicator, own_communicator = _communicator(group, chosen, config.timeout)
    core = distmoe.Context.create(
        config,
        communicator,
        backend=chosen.type,
        device=chosen.index or 0,
        num_threads=num_threads,
    )
    if chosen.type == "cuda" and not _has_gpus(chosen):
        core.close()
        raise distmoe.UnsupportedError(
            f"device is {chosen}, but PyTorch {torch.__version__} finds no GPU"
        )
    return Context(core, chosen, own_communicator)
