# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model with its own experts and with distmoe's: loss and time of both.

python examples/python/swap_experts.py testdata/qwen3moe README.md
python examples/python/swap_experts.py MODEL TEXT --implementations grouped_mm distmoe --train
python examples/python/swap_experts.py MODEL TEXT --implementations distmoe distmoe_nvfp4

The text is read as bytes, which are the vocabulary of the checkpoints in testdata/; a model that
has a tokenizer reads it with that.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import distmoe.transformers  # noqa: F401  registers "distmoe"


def tokens_of(model: Path, text: Path, num_tokens: int) -> torch.Tensor:
    if (model / "tokenizer_config.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(model)
        return tokenizer(text.read_text(), return_tensors="pt").input_ids[:, :num_tokens]
    return torch.tensor([list(text.read_bytes()[:num_tokens])])


def run(model, tokens: torch.Tensor, trains: bool) -> float:
    with torch.set_grad_enabled(trains):
        loss = model(input_ids=tokens, labels=tokens).loss
    if trains:
        loss.backward()
    return float(loss.detach())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--implementations", nargs="+", default=["grouped_mm", "distmoe"])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--train", action="store_true", help="with the backward")
    arguments = parser.parse_args()
    tokens = tokens_of(arguments.model, arguments.text, arguments.tokens)
    for implementation in arguments.implementations:
        model = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=torch.bfloat16, experts_implementation=implementation
        )
        run(model, tokens, arguments.train)  # makes contexts, fills caches
        start = time.perf_counter()
        loss = run(model, tokens, arguments.train)
        seconds = time.perf_counter() - start
        size = tokens.numel()
        print(f"{implementation}: {loss:.4f} nats a token, {seconds:.3f} s, {size} tokens")


if __name__ == "__main__":
    main()
