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


def errors(gradients, exact):
    """Of each parameter, over all windows: a gradient that cancels may be far off in one."""
    distances, norms = {}, {}
    for ours, expected in zip(gradients, exact, strict=True):
        assert ours.keys() == expected.keys()
        for parameter, gradient in expected.items():
            distance = (ours[parameter].float() - gradient).norm() ** 2
            distances[parameter] = distances.get(parameter, 0) + distance
            norms[parameter] = norms.get(parameter, 0) + gradient.norm() ** 2
    return {
        parameter: float(distances[parameter] / norm) ** 0.5
        for parameter, norm in norms.items()
        if norm > 0
    }


@pytest.mark.parametrize("name", [*CHECKPOINTS, "olmoe"])
def test_gradients_are_as_near_to_fp32_as_stock_ones(name, tmp_path, device):
    if name == "olmoe":
        folder = save_random_olmoe(tmp_path)
        windows = torch.randint(64, (4, 2, 24), generator=torch.Generator().manual_seed(2))
    else:
        folder = checkpoint(name)
        windows = tokens_of(folder).reshape(-1, 1, 32)[:8]
    windows = windows.to(device)

    def gradients(*model):
        model = load(folder, *model)
        return [gradients_of(model, window) for window in windows]

    exact = gradients("eager", torch.float32, device)
    stock = errors(gradients("grouped_mm", torch.bfloat16, device), exact)
    ours = errors(gradients("distmoe", torch.bfloat16, device), exact)
    assert ours.keys() == stock.keys()
    assert sum("experts" in parameter for parameter in ours) >= 4
    for parameter, stock_error in stock.items():
        assert ours[parameter] <= 1.5 * stock_error + 2**-8, parameter


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
