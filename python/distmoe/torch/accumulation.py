# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that backward adds to parameter.grad itself.

The sum is rounded once and no gradient of its own is allocated. Autograd still sees one gradient a
parameter: parameter.grad is taken away and handed back as the gradient, which autograd then puts in
its place without a copy. So its storage stays, and hooks fire once a backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

import distmoe
from distmoe.torch import operators
from distmoe.torch.context import Context
from distmoe.torch.eager import WEIGHT_NAMES
from distmoe.torch.graph_task import is_accumulated
from distmoe.torch.weights import Weights

# What was taken away from a parameter, with the backward (its graph task) that did it: a second
# layer of the same parameter adds to it too, in the same backward.
_taken: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def owners_of(weights: Sequence[Tensor | None]) -> list[weakref.ref | None]:
    """The parameters that hold the gradients of `weights`: these, or what they are views of."""
    owners: list[weakref.ref | None] = []
    for name, weight in zip(WEIGHT_NAMES, weights, strict=True):
        if weight is None or not weight.requires_grad:
            owners.append(None)
            continue
        owner = weight if weight.is_leaf else weight._base
        if owner is None or not owner.is_leaf or owner.numel() != weight.numel():
            raise distmoe.InvalidArgumentError(
                f"accumulate_wgrad needs {name} to be a parameter or a view of a whole one, got"
                f" {tuple(weight.shape)} made by {weight.grad_fn}"
            )
        owners.append(weakref.ref(owner))
    return owners


def _gradient_memory(name: str, owner: Tensor, weight: Tensor) -> Tensor | None:
    """What the parameter's gradient is added to: [the weight's shape], None for a first one."""
    task = torch._C._current_graph_task_id()
    memory = owner.grad
    if memory is None:
        taken_by, memory = _taken.get(owner, (None, None))
        if memory is None or taken_by != task:
            return None
    if memory.dtype != weight.dtype and not weight.is_leaf:
        # PyTorch hands a gradient through a view in the view's type: it would round the sum. So
        # the addend alone passes, and PyTorch adds it.
        return None
    if not memory.is_contiguous() or memory.device != weight.device:
        raise distmoe.InvalidArgumentError(
            f"the gradient of {name} must be contiguous and on {weight.device} to be added to, got"
            f" {tuple(memory.shape)} with strides {memory.stride()} on {memory.device}"
        )
    return memory


def accumulate(
    own: Context,
    saved: Tensor,
    dy: Tensor,
    weights: Weights,
    scores_dtype: torch.dtype,
    needs: Sequence[bool],
    owners: Sequence[weakref.ref | None],
) -> list[Tensor | None]:
    """Runs the backward; returns what autograd gets, in the order of operators.GRADIENT_NAMES."""
    places = operators.gradient_places(dy, weights.given, scores_dtype, needs, own)
    added: dict[str, tuple[Tensor, Tensor]] = {}  # parameter and memory by name
    for index, (name, weight, owner_ref) in enumerate(
        zip(WEIGHT_NAMES, weights.given, owners, strict=True), start=2
    ):
        if places[index] is None or weight is None or owner_ref is None:
            continue
        owner = owner_ref()
        if owner is None:
            raise distmoe.InvalidArgumentError(f"the parameter of {name} does not exist any more")
        memory = _gradient_memory(name, owner, weight) if is_accumulated(owner) else None
        if memory is not None:
            places[index] = memory.detach().view(weight.shape)
            added[name] = (owner, memory)
    operators.run_backward(own, saved, dy, weights, places, tuple(added))
    for index, name in enumerate(WEIGHT_NAMES, start=2):
        if name not in added:
            continue
        owner, _ = added[name]
        if owner.grad is None:
            places[index] = None  # autograd has it already, from another layer
        else:
            _take_away(owner)
    return places


def _take_away(owner: Tensor) -> None:
    """Takes parameter.grad until autograd has put it back."""
    _taken[owner] = (torch._C._current_graph_task_id(), owner.grad)
    owner.grad = None

    def forget(parameter: Tensor) -> None:
        _taken.pop(parameter, None)  # or zero_grad() would free nothing
        handle.remove()

    handle = owner.register_post_accumulate_grad_hook(forget)
