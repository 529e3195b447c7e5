# SPDX-License-Identifier: Apache-2.0
"""The names of dist_moe with their fields and defaults; what is refused, by class and words."""

import dataclasses
import inspect
import logging
import typing

import pytest
import torch

from distmoe import dist_moe

NAMES = {
    "Bf16GroupedGemmPreset",
    "BlockScaledConfig",
    "BlockScaledFormat",
    "BlockScaledKernelConfig",
    "Config",
    "Context",
    "ExecutionOptions",
    "MemoryPlan",
    "PreparedWeight",
    "RMSNormPostprocess",
    "VmmConfig",
    "create_context",
    "plan_memory",
    "prepare_block_scaled_weight",
    "routed_experts",
    "supports_fused_post_expert_rmsnorm",
}
SCALED = dist_moe.BlockScaledConfig()
NVFP4 = dist_moe.BlockScaledConfig(format=dist_moe.BlockScaledFormat.NVFP4)
KERNEL = dict(
    num_ctas=1,
    block_m=128,
    block_n=128,
    block_k=128,
    num_smem_buffers=4,
    num_c_stages=2,
    num_tmem_buffers=2,
    num_tile_buffers=2,
    epilogue_subtile=4,
    overlapping_accum=False,
    swap_ab=False,
    kloop_unroll=1,
)

PLAN_FIELDS = [
    "balanced_recv_rows",
    "device_scratch_capacity_rows",
    "total_scratch_capacity_rows",
    "device_scratch_capacity_factor",
    "total_scratch_capacity_factor",
    "saved_input_bytes_per_layer",
    "device_scratch_bytes",
    "host_scratch_bytes",
    "minimum_activation_slot_bytes",
    "balanced_full_save_activation_slot_bytes",
    "maximum_useful_activation_slot_bytes",
    "activation_slot_bytes",
    "activation_slot_capacity_factor",
    "total_activation_bytes",
    "total_device_buffer_bytes",
    "total_virtual_bytes",
    "num_activation_slots",
    "inference",
    "vmm_granularity_bytes",
    "vmm_device_prefix_bytes",
    "vmm_host_section_bytes",
    "vmm_device_scratch_section_bytes",
    "vmm_padding_bytes",
]


def config(**changes):
    values = dict(
        max_num_local_input_tokens=64,
        hidden_dim=256,
        intermediate_dim=128,
        top_k=4,
        num_experts=16,
        max_moe_layers_per_activation_slot=3,
    )
    return dist_moe.Config(**{**values, **changes})


def test_the_names_are_those_of_dist_moe():
    assert set(dist_moe.__all__) == set(dist_moe.api.__all__) == NAMES
    assert all(hasattr(dist_moe, name) for name in NAMES)


def fields_of(kind):
    return {field.name: field.default for field in dataclasses.fields(kind)}


def test_fields_and_defaults():
    assert list(fields_of(dist_moe.Config).items())[6:] == [
        ("device_scratch_capacity_factor", 1.0),
        ("activation_slot_bytes", None),
        ("activation_slot_capacity_factor", None),
        ("num_activation_slots", 1),
        ("vmm", None),
        ("num_sms", None),
        ("bf16_grouped_gemm_preset", None),
        ("block_scaled", None),
        ("activation", "swiglu"),
        ("swiglu_alpha", 1.702),
        ("swiglu_limit", 7.0),
        ("wgrad_dtype", None),
        ("inference", False),
        ("max_num_local_input_tokens", None),
    ]
    assert list(fields_of(dist_moe.Config))[:6] == [
        "num_local_input_tokens",
        "hidden_dim",
        "intermediate_dim",
        "top_k",
        "num_experts",
        "max_moe_layers_per_activation_slot",
    ]
    assert fields_of(dist_moe.VmmConfig) == dict(total_scratch_capacity_factor=16.0, prefetch=True)
    assert dict(list(fields_of(dist_moe.BlockScaledKernelConfig).items())[12:]) == dict(
        num_warps=8, static_scheduler=False
    )
    assert fields_of(dist_moe.BlockScaledConfig) == dict(
        format="mxfp8_e4m3", fast_math=False, pipeline="staged", kernel_config=None
    )
    assert fields_of(dist_moe.ExecutionOptions) == dict(
        inplace_wgrad_accum=False,
        wgrad_parameter_owners=None,
        weights_preprocess_fn=None,
        experts_output_postprocess=None,
        wgrad_postprocess_fn=None,
        swiglu_clip_stats_out_3=None,
        swiglu_clip_limit=7.0,
        wgrad_destination_fn=None,
        validate_expert_ids=False,
        zero_out_padded_callback_inputs=False,
    )
    norm = fields_of(dist_moe.RMSNormPostprocess)
    assert list(norm)[:3] == ["eps", "norm_output_dtype", "output_dtype"]
    assert list(norm.items())[3:] == [
        ("require_bitwise", True),
        ("weight", None),
        ("gain_center", 0.0),
        ("use_kahan", False),
        ("observe_expert_output_fn", None),
        ("observe_expert_output_grad_fn", None),
        ("recompute_rstd", False),
    ]
    assert list(fields_of(dist_moe.BlockScaledKernelConfig))[:12] == list(KERNEL)
    assert list(fields_of(dist_moe.MemoryPlan)) == PLAN_FIELDS
    parameters = inspect.signature(dist_moe.create_context).parameters
    assert list(parameters) == ["group", "config", "device", "emulate_peer_buffers"]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters.values())


def test_choices():
    assert set(typing.get_args(dist_moe.Bf16GroupedGemmPreset)) == {
        "1cta1mma_bm64_bn128",
        "1cta1mma_bm64_bn256",
        "1cta1mma_bm128_bn128",
        "1cta1mma_bm128_bn256",
        "1cta2mma_bm256_bn256",
        "2cta1mma_bm256_bn256",
        "2cta2mma_bm512_bn256",
    }
    formats = {each.name: str(each) for each in dist_moe.BlockScaledFormat}
    assert formats == dict(MXFP8_E4M3="mxfp8_e4m3", NVFP4="nvfp4")
    parameters = inspect.signature(dist_moe.prepare_block_scaled_weight).parameters
    assert list(parameters) == ["weight", "config", "inference", "out"]
    parameters = inspect.signature(dist_moe.routed_experts).parameters
    assert list(parameters) == ["x_TD", "ids_TK", "scores_TK", "w13", "w2", "context", "options"]
    assert list(inspect.signature(dist_moe.plan_memory).parameters) == [
        "config",
        "ep_size",
        "device",
    ]


CONFIG_ERRORS = [
    (
        dict(max_num_local_input_tokens=0),
        ValueError,
        "num_local_input_tokens must be positive, got 0",
    ),
    (dict(num_local_input_tokens=64), ValueError, "give one"),
    (dict(max_num_local_input_tokens=None), TypeError, "needs num_local_input_tokens"),
    (dict(top_k=None), TypeError, "needs top_k"),
    (dict(hidden_dim=-64), ValueError, "hidden_dim must be positive"),
    (dict(hidden_dim=96), ValueError, "hidden_dim must be a multiple of 64, got 96"),
    (dict(num_experts=0), ValueError, "num_experts must be positive"),
    (dict(top_k=17), ValueError, "top_k must be at most num_experts=16, got 17"),
    (dict(max_moe_layers_per_activation_slot=0), ValueError, "max_moe_layers"),
    (dict(activation_slot_bytes=True), TypeError, "activation_slot_bytes must be an int"),
    (dict(activation_slot_bytes=1.5), TypeError, "activation_slot_bytes must be an int"),
    (dict(activation_slot_bytes=-1), ValueError, "activation_slot_bytes must not be negative"),
    (dict(activation_slot_capacity_factor="1"), TypeError, "must be a number"),
    (dict(activation_slot_capacity_factor=float("inf")), ValueError, "finite and not negative"),
    (
        dict(activation_slot_bytes=1 << 30, activation_slot_capacity_factor=1.0),
        ValueError,
        "mutually exclusive",
    ),
    (dict(num_activation_slots=0), ValueError, "num_activation_slots must be at least 1"),
    (dict(num_activation_slots=-1, inference=True), ValueError, "at least 0, got -1"),
    (
        dict(activation_slot_capacity_factor=0.0, inference=True),
        ValueError,
        "does not retain saved activations",
    ),
    (
        dict(device_scratch_capacity_factor=0.0),
        ValueError,
        "device_scratch_capacity_factor must be finite and positive",
    ),
    (dict(num_sms=0), ValueError, "num_sms must be positive"),
    (dict(bf16_grouped_gemm_preset="fast"), ValueError, "supported BF16 preset"),
    (dict(wgrad_dtype=torch.float16), TypeError, "wgrad_dtype"),
    (dict(activation="gelu"), ValueError, "swiglu or swiglu_clamped, got 'gelu'"),
    (dict(activation="swiglu_clamped", swiglu_limit=0.0), ValueError, "finite positive"),
    (dict(activation="swiglu_clamped", swiglu_alpha=float("nan")), ValueError, "finite positive"),
    (dict(intermediate_dim=-1), ValueError, "intermediate_dim must be positive, got -1"),
    (dict(intermediate_dim=80, block_scaled=SCALED), ValueError, "multiples of 32, got 256 and 80"),
    (dict(block_scaled=NVFP4), ValueError, "inference-only"),
    (dict(block_scaled=NVFP4, inference=True), ValueError, "multiple of 256, got 256 and 128"),
    (
        dict(block_scaled=NVFP4, inference=True, hidden_dim=16640, intermediate_dim=256),
        ValueError,
        "multiple of 256.*16640",
    ),
    (
        dict(block_scaled=NVFP4, inference=True, intermediate_dim=8448),
        ValueError,
        "multiple of 256.*8448",
    ),
    # The first of dist_moe's checks wins.
    (dict(hidden_dim=96, num_experts=0, num_sms=0), ValueError, "hidden_dim must be a multiple"),
    (
        dict(num_activation_slots=0, wgrad_dtype=torch.float16),
        ValueError,
        "num_activation_slots must be at least 1",
    ),
    (
        dict(wgrad_dtype=torch.float16, activation="gelu", block_scaled=NVFP4),
        TypeError,
        "wgrad_dtype",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), CONFIG_ERRORS)
def test_config_errors(changes, error, message):
    with pytest.raises(error, match=message):
        config(**changes)
    with pytest.raises(error, match=message):
        dataclasses.replace(config(), **changes)


def test_legal_edges():
    config(activation_slot_capacity_factor=0.0, device_scratch_capacity_factor=0.5)
    config(inference=True, num_activation_slots=0)
    config(swiglu_limit=-1.0)  # of a plain swiglu: not looked at
    config(wgrad_dtype=torch.float32, num_sms=1, bf16_grouped_gemm_preset="1cta1mma_bm64_bn128")
    assert config(block_scaled=SCALED).block_scaled.format == "mxfp8_e4m3"


OTHER_ERRORS = [
    (
        lambda: dist_moe.VmmConfig(total_scratch_capacity_factor=0.0),
        ValueError,
        "total_scratch_capacity_factor must be finite and positive",
    ),
    (lambda: dist_moe.VmmConfig(prefetch=1), TypeError, "prefetch must be a bool"),
    (lambda: dist_moe.BlockScaledConfig(format="mxfp4"), ValueError, "format must be one of"),
    (lambda: dist_moe.BlockScaledConfig(format="nvfp4", fast_math=True), ValueError, "fast_math"),
    (lambda: dist_moe.BlockScaledConfig(pipeline="giga"), ValueError, "staged or mega"),
    (
        lambda: dist_moe.BlockScaledConfig(
            kernel_config=dist_moe.BlockScaledKernelConfig(**{**KERNEL, "block_k": 64})
        ),
        ValueError,
        "block_k must be 128, got 64",
    ),
    (lambda: dist_moe.BlockScaledKernelConfig(**{**KERNEL, "num_ctas": 3}), ValueError, "1 or 2"),
    (lambda: dist_moe.BlockScaledKernelConfig(**{**KERNEL, "block_m": 0}), ValueError, "block_m"),
    (
        lambda: dist_moe.BlockScaledKernelConfig(**{**KERNEL, "epilogue_subtile": 3}),
        ValueError,
        "multiple of epilogue_subtile, got 128 and 3",
    ),
    (dist_moe.PreparedWeight, TypeError, "use prepare_block_scaled_weight"),
    (dist_moe.Context, TypeError, "use create_context"),
]


@pytest.mark.parametrize(("make", "error", "message"), OTHER_ERRORS)
def test_other_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


ONE = torch.zeros(2, 2)
OPTION_ERRORS = [
    (dict(swiglu_clip_stats_out_3=[0, 0, 0]), TypeError, "must be a tensor"),
    (dict(swiglu_clip_stats_out_3=torch.zeros(3).long()), TypeError, "must be torch.float32"),
    (dict(swiglu_clip_stats_out_3=torch.zeros(4)), ValueError, r"must be contiguous \[3\]"),
    (dict(swiglu_clip_stats_out_3=torch.zeros(6)[::2]), ValueError, r"must be contiguous \[3\]"),
    (dict(swiglu_clip_stats_out_3=torch.zeros(3, device="meta")), ValueError, "CUDA"),
    (dict(swiglu_clip_limit=True), TypeError, "swiglu_clip_limit must be a number"),
    (dict(swiglu_clip_limit=float("nan")), ValueError, "finite"),
    (dict(inplace_wgrad_accum=1), TypeError, "inplace_wgrad_accum must be a bool"),
    (
        dict(inplace_wgrad_accum=True, wgrad_postprocess_fn=print),
        ValueError,
        "wgrad_postprocess_fn",
    ),
    (
        dict(inplace_wgrad_accum=True, wgrad_destination_fn=print),
        ValueError,
        "cannot be combined",
    ),
    (dict(wgrad_destination_fn=3), TypeError, "must be callable"),
    (dict(wgrad_parameter_owners=(ONE, ONE)), ValueError, "inplace_wgrad_accum"),
    (dict(wgrad_parameter_owners=ONE, inplace_wgrad_accum=True), TypeError, "two tensors"),
    (dict(validate_expert_ids=1), TypeError, "validate_expert_ids must be a bool"),
    (dict(zero_out_padded_callback_inputs=None), TypeError, "zero_out_padded_callback_inputs"),
]


@pytest.mark.parametrize(("changes", "error", "message"), OPTION_ERRORS)
def test_option_errors(changes, error, message):
    with pytest.raises(error, match=message):
        dist_moe.ExecutionOptions(**changes)


def test_a_wrong_postprocess_is_found_when_it_is_asked_for():
    options = dist_moe.ExecutionOptions(experts_output_postprocess=3)
    with pytest.raises(ValueError, match="must be callable or an RMSNormPostprocess, got int"):
        options.requires_eager  # noqa: B018


def test_the_plan_has_the_numbers_of_the_library():
    given = config(
        max_num_local_input_tokens=4096,
        top_k=8,
        hidden_dim=4096,
        intermediate_dim=14336,
        num_experts=128,
        max_moe_layers_per_activation_slot=32,
        device_scratch_capacity_factor=1.5,
        vmm=dist_moe.VmmConfig(),
    )
    plan = dist_moe.plan_memory(given, 16)
    assert plan.device_scratch_bytes == 7_449_083_904
    assert plan.host_scratch_bytes == 72_007_811_072 and plan.uses_host_scratch
    assert plan.minimum_activation_slot_bytes == plan.activation_slot_bytes == 1_073_741_824
    assert plan.balanced_full_save_activation_slot_bytes == 77_309_411_328
    without_prefetch = dataclasses.replace(given, vmm=dist_moe.VmmConfig(prefetch=False))
    assert dist_moe.plan_memory(without_prefetch, 16) == plan
    text = plan.explain()
    for words in ("activation slots", "device scratch", "host overflow scratch", "maximum useful"):
        assert words in text
    assert "minimum 1,073,741,824" in text
    inference = dist_moe.plan_memory(config(inference=True), 1).explain()
    assert "activation slots: 0 slot(s)" in inference and "across" not in inference
    assert "scratch-only inference; no saved activations" in inference


def test_the_plan_says_where_host_scratch_is_on_a_gpu():
    sizes = dict(max_num_local_input_tokens=4096, hidden_dim=4096, intermediate_dim=1024)
    given = config(**sizes, num_experts=64, vmm=dist_moe.VmmConfig())
    plan = dist_moe.plan_memory(given, 8, device="cuda")
    piece = plan.vmm_granularity_bytes
    assert piece == 2 << 20
    parts = (
        plan.vmm_device_prefix_bytes,
        plan.vmm_host_section_bytes,
        plan.vmm_device_scratch_section_bytes,
    )
    assert all(part > 0 and part % piece == 0 for part in parts)
    assert plan.total_activation_bytes <= parts[0] < plan.total_activation_bytes + piece
    assert plan.host_scratch_bytes - 2 * piece < parts[1] <= plan.host_scratch_bytes
    assert parts[2] >= plan.device_scratch_bytes and 0 < plan.vmm_padding_bytes < 4 * piece
    for changes, device in ((dict(vmm=None), "cuda"), ({}, "cpu"), ({}, None)):
        plan = dist_moe.plan_memory(dataclasses.replace(given, **changes), 8, device=device)
        assert plan.vmm_granularity_bytes is plan.vmm_host_section_bytes is None
        assert plan.vmm_padding_bytes == 0


def test_plan_errors_and_warnings(caplog):
    for ep_size, changes, message in (
        (0, {}, "ep_size must be positive, got 0"),
        (17, {}, "num_experts must be at least ep_size=17, got 16"),
        (1, dict(activation_slot_bytes=98_303), "minimum required 98304$"),
        (
            4,
            dict(
                device_scratch_capacity_factor=3.0,
                vmm=dist_moe.VmmConfig(total_scratch_capacity_factor=2.0),
            ),
            "must cover at least the device factor 3, got 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            dist_moe.plan_memory(config(**changes), ep_size)
    with pytest.raises(ValueError, match="CUDA"):
        dist_moe.plan_memory(config(), 1, device="meta")
    with caplog.at_level(logging.WARNING, "distmoe.dist_moe"):
        plan = dist_moe.plan_memory(config(device_scratch_capacity_factor=3.0), 2)
        dist_moe.plan_memory(config(activation_slot_bytes=1 << 30), 1)
    assert plan.device_scratch_capacity_factor == 2.0
    assert [record.message.split(" ")[0] for record in caplog.records] == [
        "device_scratch_capacity_factor",
        "activation",
    ]
    assert dist_moe.plan_memory(config(num_experts=15), 2).balanced_recv_rows == 256


NORM = dict(
    input_dtype=torch.bfloat16,
    score_dtype=torch.float32,
    norm_output_dtype=torch.float32,
    output_dtype=torch.bfloat16,
    topk=8,
    dim=4096,
)


def test_which_norms_are_supported():
    supports = dist_moe.supports_fused_post_expert_rmsnorm
    assert supports(**NORM) and supports(**{**NORM, "topk": 2, "dim": 256})
    for change in (
        dict(input_dtype=torch.float32),
        dict(score_dtype=torch.bfloat16),
        dict(norm_output_dtype=torch.bfloat16),
        dict(output_dtype=torch.float32),
        dict(topk=4),
        dict(dim=128),
        dict(dim=4160),
    ):
        assert not supports(**{**NORM, **change})
