# SPDX-License-Identifier: Apache-2.0
"""The context of dist_moe, around one of distmoe.torch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NoReturn

import torch
import torch.distributed

import distmoe
import distmoe.torch
from distmoe.dist_moe.config import Config, core_config, ignored_tuning, logger
from distmoe.dist_moe.norm import RMSNormPostprocess
from distmoe.dist_moe.plan import MemoryPlan, backend_of, plan_memory
from distmoe.torch.refusals import check_types

_MAKER = object()
_ids = itertools.count(1)


class Context:
    """One rank's buffers for calls of `routed_experts`; made by `create_context`.

    `buffers` and `activation_buffer` are None: distmoe keeps its memory to itself.
    """

    def __init__(self, maker: object = None, **fields: object) -> None:
        if maker is not _MAKER:
            raise TypeError("use create_context to make a Context")
        self.group = fields["group"]
        self.config: Config = fields["config"]
        self.memory_plan: MemoryPlan = fields["memory_plan"]
        self.buffers = None
        self.activation_buffer = None
        self.inner: distmoe.torch.Context = fields["inner"]
        self._routes: distmoe.torch.Context | None = None
        self._selected = (0, self.config.max_moe_layers_per_activation_slot)
        self._id = str(next(_ids))

    def __copy__(self) -> Context:
        return self

    def __deepcopy__(self, memo: object) -> Context:
        """A copied module calls the same context: its memory belongs to one group of ranks."""
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "cannot pickle a distmoe.dist_moe.Context: it holds memory, threads and peers of one"
            " process; create another of its config"
        )

    @property
    def num_local_input_tokens(self) -> int:
        return self.config.most_tokens

    max_num_local_input_tokens = num_local_input_tokens

    @property
    def hidden_dim(self) -> int:
        return self.config.hidden_dim

    @property
    def top_k(self) -> int:
        return self.config.top_k

    @property
    def context_id(self) -> str:
        self._check_open()
        return self._id

    @property
    def device(self) -> torch.device:
        return self.inner.device

    def _check_open(self) -> None:
        if self.inner.is_closed:
            raise distmoe.ClosedError(f"dist_moe context {self._id} is not live: it was closed")

    def routes(self) -> distmoe.torch.Context:
        """A context whose tokens are the T * K routes, for programs that see each route's result.

        Made at its first use, with the same slots; it takes memory of its own.
        """
        if self._routes is None:
            config = dataclasses.replace(
                self.inner.config,
                max_tokens=self.config.most_tokens * self.config.top_k,
                top_k=1,
            )
            self._routes = distmoe.torch.create_context(config, self.group, device=self.device)
            if not self.config.inference:
                self._routes.select_activation_slot(*self._selected)
        return self._routes

    def core_of(self, options: object) -> distmoe.Context:
        """The context that a call with `options` meets the peers in first."""
        post = getattr(options, "experts_output_postprocess", None)
        is_program = post is not None and not isinstance(post, RMSNormPostprocess)
        return (self.routes() if is_program else self.inner).core

    def reset(self) -> None:
        self._check_open()
        for inner in self._inners():
            inner.reset()
        self._selected = (0, self.config.max_moe_layers_per_activation_slot)

    def select_activation_slot(self, activation_slot: int, num_moe_layers_in_slot: int) -> None:
        self._check_open()
        if self.config.inference:
            return
        slots, layers = (
            self.config.num_activation_slots,
            self.config.max_moe_layers_per_activation_slot,
        )
        if not 0 <= activation_slot < slots:
            raise ValueError(f"activation slot must be in [0, {slots}), got {activation_slot}")
        if not 1 <= num_moe_layers_in_slot <= layers:
            raise ValueError(
                f"num_moe_layers must be in [1, {layers}], got {num_moe_layers_in_slot}"
            )
        for inner in self._inners():
            inner.select_activation_slot(activation_slot, num_moe_layers_in_slot)
        self._selected = (activation_slot, num_moe_layers_in_slot)

    def close(self) -> None:
        for inner in self._inners():
            inner.close()

    def _inners(self) -> list[distmoe.torch.Context]:
        return [inner for inner in (self.inner, self._routes) if inner is not None]


def _is_fake(group: object) -> bool:
    is_group = isinstance(group, torch.distributed.ProcessGroup)
    return is_group and torch.distributed.get_backend(group) == "fake"


def _size_of(group: torch.distributed.ProcessGroup | distmoe.Communicator | None) -> int:
    if group is not None:
        return group.size()
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if is_distributed else 1


def create_context(
    *,
    group: torch.distributed.ProcessGroup | distmoe.Communicator | None,
    config: Config,
    device: torch.device | str | int | None = None,
    emulate_peer_buffers: bool | None = None,
) -> Context:
    """Collective over `group`; None is the default group, or one rank where there is none.

    Without a device: the current GPU where PyTorch has one, else the CPU.
    """
    check_types(Config, config=config)
    groups = (torch.distributed.ProcessGroup, distmoe.Communicator, type(None))
    check_types(groups, group=group)
    if emulate_peer_buffers or (emulate_peer_buffers is None and _is_fake(group)):
        raise distmoe.UnsupportedError(
            "peers are not emulated: distmoe runs several ranks on one machine, with gloo on a CPU"
        )
    world_size = _size_of(group)
    if config.num_experts % world_size != 0:
        raise ValueError(
            f"num_experts must be a multiple of the {world_size} ranks, got {config.num_experts}"
        )
    plan = plan_memory(config, world_size, device=backend_of(device))
    logger.info("%s", plan.explain())
    if config.vmm is not None and not plan.uses_host_scratch:
        logger.warning("vmm is configured, but no scratch is left for host memory")
    ignored = ignored_tuning(config)
    if ignored:
        logger.info("%s: Blackwell tuning, without effect here", ", ".join(ignored))
    inner = distmoe.torch.create_context(core_config(config), group, device=device)
    return Context(_MAKER, group=group, config=config, memory_plan=plan, inner=inner)
