# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers: the small trained checkpoints, and tiny random ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM  # noqa: E402

from distmoe.transformers import ExpertsOptions, register  # noqa: E402, F401  for tests
from distmoe.transformers.experts import _POOL_OF_MODULE  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = ("mixtral", "qwen3moe", "deepseekv3", "gptoss")


def checkpoint(name: str) -> Path:
    """The folder of a checkpoint; the test is skipped where it is absent."""
    beside = os.environ.get("DISTMOE_SHARED_DATA", ROOT.parent / "shared/data")
    for parent in (ROOT / "testdata", Path(beside)):
        if (parent / name / "model.safetensors").exists():
            return parent / name
    pytest.skip(f"checkpoint {name} is neither in testdata/ nor in {beside}")


def tokens_of(folder: Path) -> torch.Tensor:
    """[2, 256] bytes of held-out text."""
    return load_file(folder / "routed_experts.safetensors")["tokens"].long()


def load(folder: Path, implementation: str, dtype: torch.dtype = torch.bfloat16, device="cpu"):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation=implementation
    ).to(device)


def save_random_olmoe(folder: Path, num_layers: int = 2) -> Path:
    """A tiny OLMoE with random weights, as a checkpoint."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=6,
        num_experts_per_tok=3,
        initializer_range=0.2,
        eos_token_id=None,
    )
    OlmoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def loss_of(model, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def gradients_of(model, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model, tokens).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def experts_modules(model) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "has_gate")]


def pool_of(model):
    """The contexts that the layers of a model share."""
    first, *others = [_POOL_OF_MODULE[module][0] for module in experts_modules(model)]
    assert others and all(pool is first for pool in others)
    return first
