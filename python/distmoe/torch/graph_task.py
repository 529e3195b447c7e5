# SPDX-License-Identifier: Apache-2.0
"""What the backward that runs now asks for, of the gradients that its graph leads to.

`ctx.needs_input_grad` says which inputs required a gradient in the forward. A backward may ask for
fewer (`torch.autograd.grad`, `backward(inputs=...)`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge


def is_accumulated(leaf: Tensor) -> bool:
    """Whether this backward adds to `leaf.grad`."""
    try:
        return _is_executed(leaf)
    except RuntimeError:  # torch.autograd.grad(..., leaf) returns it instead
        return False


def is_wanted(tensor: Tensor) -> bool:
    """Whether this backward adds the gradient of `tensor`, passes it on or returns it."""
    try:
        return _is_executed(tensor)
    except RuntimeError:
        return True


def adds_to_every_leaf() -> bool:
    """Whether this backward is one without `inputs`, which adds to every leaf that it meets."""
    return torch.autograd._is_checkpoint_valid()  # what reentrant checkpoints ask for the same


def _is_executed(tensor: Tensor) -> bool:
    # NOTE: PyTorch asks the same for its public register_multi_grad_hook(), which counts gradients
    # when they have come, too late here. It raises for a leaf that torch.autograd.grad() returns.
    return torch._C._will_engine_execute_node(get_gradient_edge(tensor).node)
