# SPDX-License-Identifier: Apache-2.0
"""What a call does beside computing."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass

import torch

from distmoe.dist_moe.norm import RMSNormPostprocess

WeightsPreprocess = Callable[[torch.Tensor], torch.Tensor]
WgradPostprocess = Callable[[str, torch.Tensor], "torch.Tensor | None"]
WgradDestination = Callable[..., "tuple[torch.Tensor, bool]"]


@dataclass(frozen=True)
class ExecutionOptions:
    """Options of one call of `routed_experts` and of its backward.

    A backward() of everything adds to the .grad of parameters that an `experts_output_postprocess`
    closes over; backward(inputs=...) and torch.autograd.grad() leave them alone, and cannot be
    asked for them.
    """

    inplace_wgrad_accum: bool = False
    wgrad_parameter_owners: tuple[torch.Tensor, torch.Tensor] | None = None
    weights_preprocess_fn: WeightsPreprocess | None = None
    experts_output_postprocess: (
        Callable[[torch.Tensor], torch.Tensor] | RMSNormPostprocess | None
    ) = None
    wgrad_postprocess_fn: WgradPostprocess | None = None
    swiglu_clip_stats_out_3: torch.Tensor | None = None
    swiglu_clip_limit: float = 7.0
    wgrad_destination_fn: WgradDestination | None = None
    validate_expert_ids: bool = False
    zero_out_padded_callback_inputs: bool = False

    def __post_init__(self) -> None:
        self._check_clip()
        self._check_wgrad()
        for name in ("validate_expert_ids", "zero_out_padded_callback_inputs"):
            self._check_bool(name)

    def _check_bool(self, name: str) -> None:
        if not isinstance(getattr(self, name), bool):
            raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")

    def _check_clip(self) -> None:
        out, limit = self.swiglu_clip_stats_out_3, self.swiglu_clip_limit
        if out is not None:
            if not isinstance(out, torch.Tensor):
                raise TypeError(
                    f"swiglu_clip_stats_out_3 must be a tensor, got {type(out).__name__}"
                )
            if out.dtype != torch.float32:
                raise TypeError(f"swiglu_clip_stats_out_3 must be torch.float32, got {out.dtype}")
            if tuple(out.shape) != (3,) or not out.is_contiguous():
                raise ValueError(
                    "swiglu_clip_stats_out_3 must be contiguous [3], got"
                    f" {list(out.shape)} with strides {list(out.stride())}"
                )
            if out.device.type not in ("cpu", "cuda"):
                raise ValueError(
                    f"swiglu_clip_stats_out_3 must be on CUDA or the CPU: {out.device}"
                )
        if isinstance(limit, bool) or not isinstance(limit, numbers.Real):
            raise TypeError(f"swiglu_clip_limit must be a number, got {limit!r}")
        if not math.isfinite(limit):
            raise ValueError(f"swiglu_clip_limit must be finite, got {limit}")

    def _check_wgrad(self) -> None:
        self._check_bool("inplace_wgrad_accum")
        inplace, owners = self.inplace_wgrad_accum, self.wgrad_parameter_owners
        destination = self.wgrad_destination_fn
        if inplace and self.wgrad_postprocess_fn is not None:
            raise ValueError("inplace_wgrad_accum leaves no gradient for wgrad_postprocess_fn")
        if destination is not None:
            if inplace or self.wgrad_postprocess_fn is not None:
                raise ValueError(
                    "wgrad_destination_fn cannot be combined with inplace_wgrad_accum or"
                    " wgrad_postprocess_fn"
                )
            if not callable(destination):
                raise TypeError(f"wgrad_destination_fn must be callable, got {destination!r}")
        if owners is None:
            return
        if not inplace:
            raise ValueError("wgrad_parameter_owners needs inplace_wgrad_accum")
        is_pair = isinstance(owners, tuple) and len(owners) == 2
        if not is_pair or not all(isinstance(owner, torch.Tensor) for owner in owners):
            raise TypeError("wgrad_parameter_owners must be a tuple of two tensors")

    @property
    def norm(self) -> RMSNormPostprocess | None:
        post = self.experts_output_postprocess
        return post if isinstance(post, RMSNormPostprocess) else None

    @property
    def callback(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The postprocess that is a program."""
        post = self.experts_output_postprocess
        if post is None or isinstance(post, RMSNormPostprocess):
            return None
        if not callable(post):
            raise ValueError(
                "experts_output_postprocess must be callable or an RMSNormPostprocess, got"
                f" {type(post).__name__}"
            )
        return post

    @property
    def requires_eager(self) -> bool:
        """Whether Python code runs in the middle of the call, which no graph can hold."""
        hooks = (self.weights_preprocess_fn, self.wgrad_postprocess_fn, self.wgrad_destination_fn)
        if self.callback is not None or any(hook is not None for hook in hooks):
            return True
        return self.norm is not None and self.norm.has_observer
