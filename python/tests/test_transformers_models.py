# SPDX-License-Identifier: Apache-2.0
"""Models of transformers with experts of distmoe compute what they compute with their own."""

import pytest
import torch

from hf_models import (
    CHECKPOINTS,
    checkpoint,
    gradients_of,
    load,
    loss_of,
    save_random_olmoe,
    tokens_of,
)
from layer import relative_error


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_loss_is_that_of_the_stock_experts(name, device):
    folder = checkpoint(name)
    tokens = tokens_of(folder).to(device)
    with torch.no_grad():
        stock = loss_of(load(folder, "grouped_mm", device=device), tokens)
        ours = loss_of(load(folder, "distmoe", device=device), tokens)
    print(f"{name}: {float(stock):.5f} nats with stock experts, {float(ours):.5f} with distmoe's")
    assert 0.5 < float(stock) < 1.5  # a trained model on real text
    assert abs(float(ours - stock)) <= 2e-3


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_cost_of_low_precisions(name, precision):
    folder = checkpoint(name)
    tokens = tokens_of(folder)
    with torch.no_grad():
        bf16 = loss_of(load(folder, "distmoe"), tokens)
        low = loss_of(load(folder, f"distmoe_{precision}"), tokens)
    print(f"{name}: {precision} costs {float(low - bf16):+.5f} nats over {float(bf16):.5f}")
    assert low != bf16 and abs(float(low - bf16)) < {"mxfp8": 0.01, "nvfp4": 0.1}[precision]


@pytest.mark.parametrize("name", [*CHECKPOINTS, "olmoe"])
def test_gradients_are_as_near_to_fp32_as_stock_ones(name, tmp_path, device):
    if name == "olmoe":
        folder = save_random_olmoe(tmp_path)
        tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(2))
    else:
        folder = checkpoint(name)
        tokens = tokens_of(folder)[:1, :32]
    tokens = tokens.to(device)
    exact = gradients_of(load(folder, "eager", torch.float32, device), tokens)
    stock = gradients_of(load(folder, "grouped_mm", device=device), tokens)
    ours = gradients_of(load(folder, "distmoe", device=device), tokens)
    assert ours.keys() == exact.keys()
    assert sum("experts" in parameter for parameter in ours) >= 4

    def error(gradients):
        return {
            parameter: relative_error(gradient, exact[parameter])
            for parameter, gradient in gradients.items()
            if exact[parameter].norm() > 0
        }

    for parameter, stock_error in error(stock).items():
        assert error(ours)[parameter] <= 1.5 * stock_error + 2**-8, parameter


def train(folder, implementation, num_steps=20):
    model = load(folder, implementation).train()
    tokens = tokens_of(folder)[:, :32]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(num_steps):
        loss = loss_of(model, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses)


def test_fine_tuning_follows_the_stock_curve():
    folder = checkpoint("gptoss")
    stock, ours = train(folder, "grouped_mm"), train(folder, "distmoe")
    # Two implementations of transformers' own differ by what BF16 leaves open.
    noise = (stock - train(folder, "eager")).abs().max()
    distance = (ours - stock).abs().max()
    print(f"loss {stock[0]:.4f} to {stock[-1]:.4f}, ours within {distance:.4f}, noise {noise:.4f}")
    assert stock[0] - stock[-1] > 0.5
    assert distance <= 2 * noise + 2**-9
