# SPDX-License-Identifier: Apache-2.0
"""The memory plan in dist_moe's fields; its numbers are those of distmoe.plan_memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

import distmoe
from distmoe.dist_moe.config import Config, core_config, logger


@dataclass(frozen=True)
class MemoryPlan:
    """What activation slots and scratch of one rank take.

    The vmm_ fields are of a GPU, with host scratch: where the memory of a rank is, in pieces of
    `vmm_granularity_bytes`; the section of device scratch holds metadata and workspace too. None
    without host scratch, on a CPU and where no device was given.
    """

    balanced_recv_rows: int
    device_scratch_capacity_rows: int
    total_scratch_capacity_rows: int
    device_scratch_capacity_factor: float
    total_scratch_capacity_factor: float
    saved_input_bytes_per_layer: int
    device_scratch_bytes: int
    host_scratch_bytes: int
    minimum_activation_slot_bytes: int
    balanced_full_save_activation_slot_bytes: int
    maximum_useful_activation_slot_bytes: int
    activation_slot_bytes: int
    activation_slot_capacity_factor: float | None
    total_activation_bytes: int
    total_device_buffer_bytes: int
    total_virtual_bytes: int
    num_activation_slots: int
    inference: bool
    vmm_granularity_bytes: int | None = None
    vmm_device_prefix_bytes: int | None = None
    vmm_host_section_bytes: int | None = None
    vmm_device_scratch_section_bytes: int | None = None
    vmm_padding_bytes: int = 0

    @property
    def uses_host_scratch(self) -> bool:
        return self.host_scratch_bytes > 0

    def explain(self) -> str:
        slots = f"activation slots: {self.num_activation_slots} slot(s)"
        if self.inference:
            lines = [f"{slots}, scratch-only inference; no saved activations"]
        else:
            lines = [
                f"{slots} of {self.activation_slot_bytes:,} bytes, {self.total_activation_bytes:,}"
                " across all",
                f"  minimum {self.minimum_activation_slot_bytes:,} (inputs alone), balanced"
                f" {self.balanced_full_save_activation_slot_bytes:,}, maximum useful"
                f" {self.maximum_useful_activation_slot_bytes:,} bytes",
            ]
        lines += [
            f"device scratch: {self.device_scratch_bytes:,} bytes for"
            f" {self.device_scratch_capacity_rows:,} rows (factor"
            f" {self.device_scratch_capacity_factor:g}; balanced routing has"
            f" {self.balanced_recv_rows:,})",
            f"host overflow scratch: {self.host_scratch_bytes:,} bytes, up to"
            f" {self.total_scratch_capacity_rows:,} rows (factor"
            f" {self.total_scratch_capacity_factor:g})",
            f"total: {self.total_device_buffer_bytes:,} bytes on the device,"
            f" {self.total_virtual_bytes:,} with host memory",
        ]
        if self.inference:
            bounds = self.minimum_activation_slot_bytes, self.maximum_useful_activation_slot_bytes
            lines.append(f"slot bounds: minimum {bounds[0]:,}, maximum useful {bounds[1]:,} bytes")
        return "\n".join(lines)


def backend_of(device: torch.device | str | int | None) -> str:
    """cpu or cuda; ValueError for another device."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind = "cuda" if isinstance(device, int) else torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device must be CUDA or CPU, got {device}")
    return kind


def plan_memory(
    config: Config, ep_size: int, *, device: torch.device | str | int | None = None
) -> MemoryPlan:
    """A pure function: asks no device; `device` is checked alone."""
    if ep_size <= 0:
        raise ValueError(f"ep_size must be positive, got {ep_size}")
    if config.num_experts < ep_size:
        raise ValueError(
            f"num_experts must be at least ep_size={ep_size}, got {config.num_experts}: a rank"
            " would own no expert"
        )
    is_for_gpu = device is not None and backend_of(device) == "cuda"
    device_factor = min(config.device_scratch_capacity_factor, float(ep_size))
    if device_factor < config.device_scratch_capacity_factor:
        logger.warning(
            "device_scratch_capacity_factor %g is more than all ranks can send; %g is used",
            config.device_scratch_capacity_factor,
            device_factor,
        )
    if config.vmm is not None:
        total = min(config.vmm.total_scratch_capacity_factor, float(ep_size))
        if total < device_factor:
            raise ValueError(
                f"total_scratch_capacity_factor must cover at least the device factor"
                f" {device_factor:g}, got {total:g}"
            )
    plan = _checked_core_plan(config, ep_size)
    if not config.inference and plan.slot_bytes > plan.max_useful_slot_bytes:
        logger.warning(
            "activation slots of %d bytes are larger than any routing uses; %d bytes would do",
            plan.slot_bytes,
            plan.max_useful_slot_bytes,
        )
    return MemoryPlan(
        balanced_recv_rows=plan.balanced_rows,
        device_scratch_capacity_rows=plan.device_scratch_rows,
        total_scratch_capacity_rows=plan.total_scratch_rows,
        device_scratch_capacity_factor=plan.device_scratch_factor,
        total_scratch_capacity_factor=plan.total_scratch_factor,
        saved_input_bytes_per_layer=plan.saved_input_bytes_per_layer,
        device_scratch_bytes=plan.device_scratch_bytes,
        host_scratch_bytes=plan.host_scratch_bytes,
        minimum_activation_slot_bytes=plan.minimum_slot_bytes,
        balanced_full_save_activation_slot_bytes=plan.balanced_slot_bytes,
        maximum_useful_activation_slot_bytes=plan.max_useful_slot_bytes,
        activation_slot_bytes=plan.slot_bytes,
        activation_slot_capacity_factor=config.activation_slot_capacity_factor,
        total_activation_bytes=plan.total_activation_bytes,
        total_device_buffer_bytes=plan.total_device_bytes,
        total_virtual_bytes=plan.total_virtual_bytes,
        num_activation_slots=plan.num_slots,
        inference=config.inference,
        **(_sections(config, ep_size) if is_for_gpu and plan.host_scratch_bytes > 0 else {}),
    )


def _sections(config: Config, ep_size: int) -> dict[str, int]:
    plan = distmoe.plan_memory(core_config(config), ep_size, backend="cuda")
    sections = distmoe.physical_sections(plan)
    return dict(
        vmm_granularity_bytes=sections.granularity_bytes,
        vmm_device_prefix_bytes=sections.device_prefix_bytes,
        vmm_host_section_bytes=sections.host_bytes,
        vmm_device_scratch_section_bytes=sections.device_hot_bytes,
        vmm_padding_bytes=sections.padding_bytes,
    )


def _checked_core_plan(config: Config, ep_size: int) -> distmoe.MemoryPlan:
    exact = config.activation_slot_bytes
    if exact is not None:
        smallest = dataclasses.replace(config, activation_slot_bytes=None)
        least = distmoe.plan_memory(core_config(smallest), ep_size).minimum_slot_bytes
        if exact < least:
            raise ValueError(f"activation_slot_bytes is {exact}; minimum required {least}")
    return distmoe.plan_memory(core_config(config), ep_size)
