# SPDX-License-Identifier: Apache-2.0
"""A call whose weights and weight gradients pass through the caller's programs."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import torch

from distmoe.dist_moe.layouts import as_matrices
from distmoe.dist_moe.options import ExecutionOptions
from distmoe.dist_moe.owners import owners_of
from distmoe.torch import PreparedWeight
from distmoe.torch.eager import EagerCall
from distmoe.torch.graph_task import is_accumulated
from distmoe.torch.refusals import agree

NAMES = ("w2", "w13")  # the order in which programs get gradients


class HookedCall(EagerCall):
    """An EagerCall of dist_moe's options; w13 and w2 are the arguments as they were given, or what
    the `prepared` ones were made of."""

    def __init__(
        self,
        context,
        options: ExecutionOptions,
        arguments: dict[str, torch.Tensor],
        prepared: Sequence[PreparedWeight] = (),
        **core_options,
    ) -> None:
        super().__init__(context, **core_options)
        self._options, self._prepared = options, prepared
        self._shapes = {name: argument.shape for name, argument in arguments.items()}
        self._owners = (
            {name: weakref.ref(owner) for name, owner in owners_of(options, arguments).items()}
            if options.inplace_wgrad_accum and torch.is_grad_enabled()
            else {}
        )
        self._dtypes = {name: argument.dtype for name, argument in arguments.items()}
        self._are_owners = {
            name for name, owner in self._owners.items() if owner() is arguments[name]
        }
        if options.wgrad_parameter_owners is not None:  # a call keeps no parameter alive
            self._options = dataclasses.replace(options, wgrad_parameter_owners=None)
        self._taken: dict[str, torch.Tensor] = {}
        self.used: tuple[object, ...] = ()  # of the last forward or backward

    def weights(self, w13, w2, bias13, bias2):
        preprocess = self._options.weights_preprocess_fn
        if preprocess is not None:
            w13, w2 = _checked_weight("w13", w13, preprocess), _checked_weight("w2", w2, preprocess)
        matrices = as_matrices(w13, w2, self.context.num_local_experts, self.context.config)
        return *matrices, None, None

    def operands(self, *used):
        if self._prepared:
            used = (*(weight.core() for weight in self._prepared), None, None)
        self.used = used
        return used

    def destinations(self, used, *, creates_graph):
        if self._options.wgrad_destination_fn is not None:
            return self._given_destinations(used)
        places, added = super().destinations(used, creates_graph=creates_graph)
        memory = {}
        if self._owners and not creates_graph:
            memory = {name: self._owned_memory(name) for name in used}
        # Like dist_moe's: either both are added to, or fresh gradients are returned.
        if memory and all(place is not None for place in memory.values()):
            self._taken = memory
            places = {name: place.detach().view(used[name].shape) for name, place in memory.items()}
            added = set(places)
        return places, added

    def _owned_memory(self, name: str) -> torch.Tensor | None:
        owner = self._owners[name]()
        if owner is None:
            raise RuntimeError(f"the parameter that owns the gradient of {name} is gone")
        memory = owner.grad
        if memory is None or not is_accumulated(owner):
            return None
        if memory.dtype != self._dtypes[name] and name not in self._are_owners:
            return None  # autograd would round the sum on its way from the argument to the owner
        fits = memory.shape == owner.shape and memory.device == owner.device
        if not fits or not memory.is_contiguous():
            raise RuntimeError(
                f"the gradient of {name}'s owner must be contiguous {list(owner.shape)} on"
                f" {owner.device} to be added to, got {list(memory.shape)} on {memory.device}"
            )
        if memory.dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"the gradient of {name}'s owner must be bfloat16 or float32")
        return memory

    def _given_destinations(self, used):
        places, added = {}, set()
        for name in NAMES:
            if name not in used:
                continue
            wanted = (self._shapes[name], self.wgrad_dtype(used[name]), used[name].device)
            tensor, is_added = _checked_destination(
                name, self._options.wgrad_destination_fn(name, *wanted), *wanted
            )
            places[name] = tensor.detach().view(used[name].shape)
            if is_added:
                added.add(name)
        return places, added

    def finish(self) -> None:
        self.used = ()

    def deliver(self, gradients):
        if self._options.wgrad_destination_fn is not None:
            return {}
        postprocess = self._options.wgrad_postprocess_fn
        if postprocess is not None:
            return self._postprocessed(postprocess, gradients)
        for name, memory in self._taken.items():
            # NOTE: autograd gets the parameter's own gradient back, so that its storage stays and
            # hooks run once.
            owner = self._owners[name]()
            owner.grad = None
            gradients[name] = memory.detach()
        self._taken = {}
        return gradients

    def _postprocessed(self, postprocess, gradients):
        """Where it raises on any rank, after the ranks met, all raise."""
        results = {}
        try:
            for name in NAMES:
                if name in gradients:
                    gradient = gradients[name].view(self._logical_shape(name, gradients))
                    results[name] = _checked_gradient(name, gradient, postprocess)
        except Exception as error:
            agree(self.context, error)
        agree(self.context, None)
        return results

    def _logical_shape(self, name, gradients):
        shape = self._shapes[name]
        return shape if shape.numel() == gradients[name].numel() else gradients[name].shape


def _checked_weight(name: str, weight: torch.Tensor, preprocess) -> torch.Tensor:
    answer = preprocess(weight)
    if not isinstance(answer, torch.Tensor):
        raise TypeError(
            f"weights_preprocess_fn must return a tensor for {name}, got {type(answer).__name__}"
        )
    if answer.device != weight.device:
        raise ValueError(
            f"weights_preprocess_fn must stay on {weight.device} for {name}, got {answer.device}"
        )
    return answer


def _checked_gradient(name: str, gradient: torch.Tensor, postprocess) -> torch.Tensor | None:
    answer = postprocess(name, gradient)
    if answer is None:
        return None
    if not isinstance(answer, torch.Tensor):
        raise TypeError(
            f"wgrad_postprocess_fn must return a tensor or None for {name}, got"
            f" {type(answer).__name__}"
        )
    if answer.shape != gradient.shape or answer.device != gradient.device:
        raise ValueError(
            f"wgrad_postprocess_fn must return {list(gradient.shape)} on {gradient.device} for"
            f" {name}, got {list(answer.shape)} on {answer.device}"
        )
    if not answer.is_floating_point():
        raise TypeError(f"wgrad_postprocess_fn must return floats for {name}, got {answer.dtype}")
    return answer


def _checked_destination(name, answer, shape, dtype, device) -> tuple[torch.Tensor, bool]:
    is_pair = isinstance(answer, tuple) and [type(item) for item in answer][1:] == [bool]
    if not is_pair or not isinstance(answer[0], torch.Tensor):
        raise TypeError(
            f"wgrad_destination_fn must return (tensor, accumulate) for {name}: {answer!r}"
        )
    tensor = answer[0]
    fits = (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, device)
    if not fits or not tensor.is_contiguous():
        raise RuntimeError(
            f"wgrad_destination_fn must return a contiguous tensor of the requested shape"
            f" {list(shape)}, {dtype}, on {device} for {name}, got {list(tensor.shape)},"
            f" {tensor.dtype}, on {tensor.device}"
        )
    return answer
