# SPDX-License-Identifier: Apache-2.0
"""The experts of this rank as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import distmoe
from distmoe.torch.context import Context
from distmoe.torch.refusals import check_types
from distmoe.torch.routed_experts import routed_experts


class RoutedExperts(nn.Module):
    """Weights of the experts that this rank of `context` owns, and the call over all ranks.

    `w13` is [L, 2F, D], `w2` [L, D, F], in BF16, with `has_bias` also `bias13` [L, 2F] and `bias2`
    [L, D]. Which experts these are: `context.first_expert` and the L - 1 after it. A rank may own
    none. With a `clip_limit` the buffer `clip_counts` holds what the last forward counted.
    """

    def __init__(
        self,
        context: Context,
        *,
        has_bias: bool = False,
        norm: distmoe.PostExpertNorm | None = None,
        clip_limit: float | None = None,
        accumulate_wgrad: bool = False,
    ) -> None:
        super().__init__()
        check_types(Context, context=context)
        config, experts = context.config, context.num_local_experts
        width, depth = config.hidden_dim, config.intermediate_dim
        self.context, self.norm, self.accumulate_wgrad = context, norm, accumulate_wgrad
        self.clip_limit = clip_limit
        self.clip_counts: Tensor
        counts = torch.zeros(3, dtype=torch.int64, device=context.device)
        self.register_buffer("clip_counts", counts, persistent=False)

        def parameter(*shape: int) -> nn.Parameter:
            memory = torch.empty(*shape, dtype=torch.bfloat16, device=context.device)
            return nn.Parameter(memory, requires_grad=not context.inference)

        self.w13, self.w2 = parameter(experts, 2 * depth, width), parameter(experts, width, depth)
        self.bias13 = parameter(experts, 2 * depth) if has_bias else None
        self.bias2 = parameter(experts, width) if has_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(what a row sums over), as nn.Linear does; biases are zero."""
        for weight in (self.w13, self.w2):
            bound = weight.shape[-1] ** -0.5
            weight.uniform_(-bound, bound)
        for bias in (self.bias13, self.bias2):
            if bias is not None:
                bias.zero_()

    def forward(self, x: Tensor, topk_ids: Tensor, topk_scores: Tensor) -> Tensor:
        """`x` is [..., D], ids and scores are [..., K]; so is what is returned, [..., D]."""
        answer = routed_experts(
            _rows(x),
            _rows(topk_ids),
            _rows(topk_scores),
            self.w13,
            self.w2,
            self.context,
            bias13=self.bias13,
            bias2=self.bias2,
            norm=self.norm,
            clip_limit=self.clip_limit,
            accumulate_wgrad=self.accumulate_wgrad,
        )
        if self.clip_limit is None:
            return answer.view(x.shape)
        y, counts = answer
        self.clip_counts.copy_(counts)
        return y.view(x.shape)

    def extra_repr(self) -> str:
        config = self.context.config
        return (
            f"{self.context.num_local_experts} of {config.num_experts} experts,"
            f" D={config.hidden_dim}, F={config.intermediate_dim}, K={config.top_k},"
            f" {config.activation}"
        )


def _rows(tensor: Tensor) -> Tensor:
    """[..., N] as [T, N]; what is none is left for the call to refuse, which peers take part in."""
    if not isinstance(tensor, Tensor) or tensor.ndim == 0 or tensor.shape[-1] == 0:
        return tensor
    return tensor.reshape(-1, tensor.shape[-1])
