# SPDX-License-Identifier: Apache-2.0
"""The weights of a call: tensors, or codes and scales of tensors, and how operators pass them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

import distmoe


class PreparedWeight:
    """A weight as codes and block scales, for many calls; `prepare_block_scaled_weight` makes it.

    Takes the place of `w13` or `w2`. `source`, the weight that was prepared, is not read by calls,
    and gets the gradient where it requires one. The tensors hold bits in the layouts of
    docs/formats.md: uint8, global scales FP32. Calls do not look at the scales: of codes that come
    from elsewhere `distmoe.check_scales(weight.core())` refuses those that are NaN.
    """

    def __init__(
        self,
        source: Tensor,
        format: str,
        codes: Tensor,
        scales: Tensor,
        global_scales: Tensor | None = None,
        *,
        inference: bool = False,
        gate_up_layout: str = "concatenated",
    ) -> None:
        self.source, self.format, self.inference = source, format, inference
        self.gate_up_layout = gate_up_layout
        self.codes, self.scales, self.global_scales = codes, scales, global_scales

    def tensors(self) -> list[Tensor]:
        """Codes, scales and, where the format has them, global scales."""
        own = [self.codes, self.scales]
        return own if self.global_scales is None else [*own, self.global_scales]

    def core(self) -> distmoe.PreparedWeight:
        return distmoe.PreparedWeight(
            self.format,
            *self.tensors(),
            inference=self.inference,
            gate_up_layout=self.gate_up_layout,
        )


def split(
    w13: Tensor | PreparedWeight, w2: Tensor | PreparedWeight, config: distmoe.Config
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What operators take: the weights that get gradients, and what is computed with in their
    place, of W13 and then of W2; nothing where they are computed with themselves."""
    if isinstance(w13, Tensor) and isinstance(w2, Tensor):
        return w13, w2, []
    for name, weight in (("w13", w13), ("w2", w2)):
        if not isinstance(weight, PreparedWeight):
            raise TypeError(
                f"{name} is {type(weight).__name__}; w13 and w2 must both be tensors, or both"
                " distmoe.torch.PreparedWeight"
            )
        own = (config.precision, config.inference)
        if (weight.format, weight.inference) != own:
            raise distmoe.InvalidArgumentError(
                f"{name} is prepared for {_use(weight.format, weight.inference)}; this context is"
                f" for {_use(*own)}"
            )
    if w13.gate_up_layout != config.gate_up_layout:
        raise distmoe.InvalidArgumentError(
            f"w13 is prepared as {w13.gate_up_layout}; this context has {config.gate_up_layout}"
        )
    return w13.source, w2.source, [*w13.tensors(), *w2.tensors()]


def _use(precision: str, inference: bool) -> str:
    return f"{precision} {'inference' if inference else 'training'}"


class Weights(NamedTuple):
    """Of one call of an operator."""

    given: Sequence[Tensor | None]  # in the order of eager.WEIGHT_NAMES
    prepared: Sequence[Tensor]

    def core_arguments(self, config: distmoe.Config) -> dict[str, object]:
        w13, w2, bias13, bias2 = self.given
        if not self.prepared:
            return dict(w13=w13, w2=w2, bias13=bias13, bias2=bias2)
        half = len(self.prepared) // 2
        coded13, coded2 = (
            distmoe.PreparedWeight(
                config.precision,
                *tensors,
                inference=config.inference,
                gate_up_layout=layout,
                has_known_scales=True,
            )
            for tensors, layout in (
                (self.prepared[:half], config.gate_up_layout),
                (self.prepared[half:], "concatenated"),
            )
        )
        return dict(w13=coded13, w2=coded2, bias13=bias13, bias2=bias2)
