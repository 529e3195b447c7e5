# SPDX-License-Identifier: Apache-2.0
"""The contexts of one model's experts.

All layers of a model share contexts: one for calls that need no gradient, and one for each pass of
the model whose backward has not come yet, whose layers share its one activation slot. A second pass
through a layer before the backward of the first takes another context, so that backwards may come
in any order. Contexts grow with the number of tokens and go with the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import torch

import distmoe
from distmoe.errors import InvalidArgumentError
from distmoe.torch.eager import EagerCall
from distmoe.transformers.gate import Gate


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions:
    """How experts run; the fields are those of `distmoe.Config`.

    With the slot factor 1.0 a pass keeps its activations, with 0.0 its inputs alone, and the
    backward computes the rest again.
    """

    precision: Literal["bf16", "mxfp8", "nvfp4"] = "bf16"
    activation_slot_capacity_factor: float = 1.0
    activation_policy: Literal["full", "lean"] = "full"
    num_threads: int = 0

    def __post_init__(self) -> None:
        legal = get_args(get_type_hints(type(self))["precision"])
        if self.precision not in legal:
            raise InvalidArgumentError(
                f"precision is {self.precision!r}; legal is one of {', '.join(legal)}"
            )
        if isinstance(self.num_threads, bool) or not isinstance(self.num_threads, int):
            raise TypeError(f"num_threads is {self.num_threads!r}; it must be an integer")
        if not 0 <= self.num_threads <= 1024:
            raise InvalidArgumentError(
                f"num_threads is {self.num_threads}; legal are 0 (choose) to 1024"
            )
        # NVFP4 trains nothing, and its contexts never see these: they are checked as BF16's.
        precision = "bf16" if self.precision == "nvfp4" else self.precision
        distmoe.Config(
            max_tokens=1,
            hidden_dim=64,
            intermediate_dim=64,
            top_k=1,
            num_experts=1,
            max_moe_layers_per_activation_slot=1,
            precision=precision,
            activation_slot_capacity_factor=self.activation_slot_capacity_factor,
            activation_policy=self.activation_policy,
        )


@dataclass(frozen=True)
class Geometry:
    """What of a model its contexts depend on."""

    hidden_dim: int
    intermediate_dim: int
    top_k: int
    num_experts: int
    num_layers: int
    gate: Gate
    device: torch.device


class PassContext:
    """A training context and the layers whose backward it waits for."""

    def __init__(self, context: distmoe.Context) -> None:
        self.context = context
        self.live: set[int] = set()
        self.needs_reset = False

    def takes(self, layer: int, num_tokens: int) -> bool:
        config = self.context.config
        if num_tokens > config.max_tokens or layer in self.live:
            return False
        return not self.live or not self.needs_reset

    def lease(self, layer: int) -> Lease:
        if self.needs_reset:
            self.context.reset()
            self.needs_reset = False
        self.live.add(layer)
        return Lease(self, layer)


class Lease(EagerCall):
    """One layer's stay in a context, from its forward to the end of its backward."""

    def __init__(self, owner: PassContext, layer: int) -> None:
        super().__init__(owner.context)
        self._owner = owner
        self._layer = layer
        self._is_open = True

    def finish(self) -> None:
        """The backward is done."""
        self._is_open = False
        self._owner.live.discard(self._layer)

    def __del__(self) -> None:
        if self._is_open:  # a forward whose backward never came leaves its slot unusable
            self._owner.needs_reset = True
            self._owner.live.discard(self._layer)


class ContextPool:
    """Contexts of one geometry, made when they are needed."""

    def __init__(self, geometry: Geometry, options: ExpertsOptions, model_config: object) -> None:
        self.model_config = model_config  # kept, so that its identity stays the model's
        self.geometry = geometry
        self.options = options
        self._forward_only: distmoe.Context | None = None
        self._passes: list[PassContext] = []  # the last one is that of the current pass

    def for_forward(self, num_tokens: int) -> EagerCall:
        """A call without backward."""
        context = self._forward_only
        if context is None or context.config.max_tokens < num_tokens:
            self._forward_only = context = self._create(num_tokens, inference=True)
        return EagerCall(context)

    def for_training(self, layer: int, num_tokens: int) -> Lease:
        """A place for the saving forward of `layer`."""
        current = self._passes[-1] if self._passes else None
        if current is None or not current.takes(layer, num_tokens):
            current = self._next_pass(layer, num_tokens)
        return current.lease(layer)

    def _next_pass(self, layer: int, num_tokens: int) -> PassContext:
        idle = [a_pass for a_pass in self._passes if not a_pass.live]
        fitting = [a_pass for a_pass in idle if a_pass.takes(layer, num_tokens)]
        self._passes = [a_pass for a_pass in self._passes if a_pass.live]
        chosen = fitting[0] if fitting else PassContext(self._create(num_tokens, inference=False))
        self._passes.append(chosen)
        return chosen

    def _create(self, num_tokens: int, *, inference: bool) -> distmoe.Context:
        geometry, options, gate = self.geometry, self.options, self.geometry.gate
        slot = {}
        if not inference:
            slot = dict(
                activation_slot_capacity_factor=options.activation_slot_capacity_factor,
                activation_policy=options.activation_policy,
            )
        config = distmoe.Config(
            # The next power of two, so that growing prompts do not make a context each.
            max_tokens=1 << max(num_tokens - 1, 15).bit_length(),
            hidden_dim=geometry.hidden_dim,
            intermediate_dim=geometry.intermediate_dim,
            top_k=geometry.top_k,
            num_experts=geometry.num_experts,
            max_moe_layers_per_activation_slot=geometry.num_layers,
            precision=options.precision,
            activation=gate.activation,
            swiglu_alpha=gate.swiglu_alpha,
            swiglu_limit=gate.swiglu_limit,
            gate_up_layout=gate.gate_up_layout,
            inference=inference,
            **slot,
        )
        if geometry.device.type == "cuda":
            return distmoe.Context.create(config, backend="cuda", device=geometry.device.index or 0)
        return distmoe.Context.create(config, num_threads=options.num_threads)
