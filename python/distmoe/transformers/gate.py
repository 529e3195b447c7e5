# SPDX-License-Identifier: Apache-2.0
"""Which of distmoe's activations an experts module computes between its two products.

transformers says it in code (`_apply_gate`, `act_fn`), which models override. So the module is
asked: its answer to a few rows must be that of one of distmoe's activations, in FP32, or it is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distmoe.errors import UnsupportedError


@dataclass(frozen=True)
class Gate:
    """The fields of a Config that say what happens to the output of W13."""

    gate_up_layout: str
    activation: str
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.gate_up_layout == "interleaved":
            gate, up = rows[..., ::2], rows[..., 1::2]
        else:
            gate, up = rows.chunk(2, dim=-1)
        if self.activation == "swiglu":
            return gate * torch.sigmoid(gate) * up
        gate = gate.clamp(max=self.swiglu_limit)
        up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
        return gate * torch.sigmoid(self.swiglu_alpha * gate) * (up + 1)


def gate_of(module: torch.nn.Module, intermediate_dim: int) -> Gate:
    """The gate of an experts module; UnsupportedError where it is none of distmoe's."""
    alpha, limit = getattr(module, "alpha", 1.702), getattr(module, "limit", 7.0)
    candidates = [Gate(layout, "swiglu") for layout in ("concatenated", "interleaved")]
    candidates += [
        Gate(layout, "swiglu_clamped", float(alpha), float(limit))
        for layout in ("concatenated", "interleaved")
        if isinstance(alpha, (int, float)) and isinstance(limit, (int, float))
    ]
    # From -20 to 20: beyond every limit that a model has, and where each activation curves.
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(8, 2 * intermediate_dim, generator=generator) * 40 - 20
    with torch.no_grad():
        answer = module._apply_gate(rows)
        for gate in candidates:
            if torch.allclose(answer, gate(rows), rtol=1e-5, atol=1e-6):
                return gate
    raise UnsupportedError(
        f"{type(module).__name__} computes another activation than swiglu and swiglu_clamped"
        f" (alpha {alpha}, limit {limit}), which are what distmoe has"
    )
