# SPDX-License-Identifier: Apache-2.0
"""The block quantisers on tensors of PyTorch and NumPy, held against PyTorch's own casts."""

import numpy as np
import pytest
import torch

import distmoe
from layer import BF16, same_bits

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def random_matrix(rows, columns):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(9)) * 3
    return values.to(BF16)


def arrays(matrix):
    found = (matrix.codes, matrix.scales, matrix.factors)
    return [None if each is None else torch.from_dlpack(each) for each in found]


def decoded_fp4(codes):
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()
    return torch.where(nibbles < 8, 1.0, -1.0) * E2M1[nibbles & 7]


def by_block(values, blocks):
    """A number for each block, that of its largest magnitude, at all of its elements."""
    rows, columns = {"rows": (1, 32), "columns": (32, 1), "tiles": (32, 32)}[blocks]
    parts = values.abs().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return parts.amax(dim=(1, 3))


@pytest.mark.parametrize("blocks", ["rows", "columns", "tiles"])
def test_mxfp8_has_the_codes_of_torchs_cast(blocks):
    values = random_matrix(64, 96)
    codes, scales, factors = arrays(distmoe.quantise(values, "mxfp8", blocks))
    largest = by_block(values.double(), blocks)
    assert scales.shape == largest.shape and factors is None
    exponents = scales.double() - 127
    assert (largest <= 448 * 2**exponents).all() and (largest > 224 * 2**exponents).all()
    spread = exponents
    for dim, size in enumerate(values.shape):
        spread = spread.repeat_interleave(size // spread.shape[dim], dim)
    scaled = values.float() * torch.exp2(-spread).float()
    assert same_bits(codes, scaled.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_fp4_takes_the_nearest_code(format):
    values = random_matrix(5, 64)
    matrix = distmoe.quantise(values, format)
    codes, scales, factors = arrays(matrix)
    assert codes.shape == (5, 32) and scales.shape == (5, 2 if format == "mxfp4" else 4)
    if format == "mxfp4":
        scale = torch.exp2(scales.double() - 127)
    else:
        assert torch.equal(factors, torch.full((5,), 2688.0) / values.float().abs().amax(1))
        scale = scales.view(torch.float8_e4m3fn).double() / factors.double().unsqueeze(1)
    scale = scale.repeat_interleave(64 // scale.shape[1], dim=1)
    chosen = decoded_fp4(codes)
    distance = (values.double() / scale - chosen).abs()
    every = torch.cat([E2M1, -E2M1])
    best = (values.double().unsqueeze(-1) / scale.unsqueeze(-1) - every).abs().amin(-1)
    assert (distance <= best + 1e-5).all()
    exact = torch.from_dlpack(distmoe.dequantise(matrix))
    assert torch.allclose(exact.double(), chosen * scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_numpy_gives_the_bits_of_torch(format):
    values = random_matrix(33, 50)
    bits = np.from_dlpack(values.view(torch.uint16))
    ours = distmoe.quantise(distmoe.Reinterpreted(bits, "bf16"), format)
    theirs = distmoe.quantise(values, format)
    for left, right in zip(arrays(ours), arrays(theirs)):
        assert left is right is None or same_bits(left, right)
    again = distmoe.QuantisedMatrix(
        format=format,
        num_columns=50,
        codes=np.from_dlpack(ours.codes),
        scales=np.from_dlpack(ours.scales),
        factors=None if ours.factors is None else np.from_dlpack(ours.factors),
    )
    left, right = (np.from_dlpack(distmoe.dequantise(each)) for each in (again, theirs))
    assert np.array_equal(left, right) and left.shape == (33, 50)
    assert np.abs(left - values.float().numpy()).max() < 2.1


def test_what_is_no_number_poisons_its_block():
    values = random_matrix(2, 64)
    values[0, 40] = float("nan")
    matrix = distmoe.quantise(values, "mxfp8")
    decoded = torch.from_dlpack(distmoe.dequantise(matrix))
    assert torch.equal(decoded.isnan().sum(1), torch.tensor([32, 0]))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(values=torch.zeros(4, 32)), ValueError, "values must be bf16, got f32"),
        (dict(values=torch.zeros(32).to(BF16)), ValueError, r"values must be \[R, C\]"),
        (dict(values=torch.zeros(2, 2, 32).to(BF16)), ValueError, r"values must be \[R, C\]"),
        (dict(values=[[1.0]]), TypeError, "values is list; it must be a tensor"),
        (dict(format="fp8"), ValueError, "format is 'fp8'; legal is one of"),
        (dict(format="bf16"), ValueError, "is bf16; legal are mxfp8, mxfp4 and nvfp4"),
        (dict(blocks="cubes"), ValueError, "blocks is 'cubes'; legal is one of rows, columns"),
        (dict(format="nvfp4", blocks="tiles"), ValueError, "nvfp4 has blocks of rows alone"),
    ],
)
def test_wrong_arguments(changes, error, words):
    given = dict(values=random_matrix(4, 32), format="mxfp8", blocks="rows")
    with pytest.raises(error, match=words):
        distmoe.quantise(**{**given, **changes})


def test_wrong_matrices():
    made = distmoe.quantise(random_matrix(4, 64), "mxfp8")
    own = dict(format="mxfp8", num_columns=64, codes=made.codes, scales=made.scales)
    for changes, words in (
        (dict(codes=made.scales), r"codes must be f8_e4m3 \[4, 64\], got f8_e4m3 \[4, 2\]"),
        (dict(num_columns=32), r"codes must be f8_e4m3 \[4, 32\]"),
        (dict(num_columns=-1), r"cannot be \[4, -1\]"),
        (dict(scales=torch.zeros(4, 2)), "scales must be uint8, the bits of f8_e8m0"),
        (dict(factors=torch.ones(4)), "factors must be left out"),
        (dict(codes=torch.zeros((), dtype=torch.uint8)), "codes: a DLPack tensor has 0 dimensions"),
    ):
        with pytest.raises(ValueError, match=words):
            distmoe.dequantise(distmoe.QuantisedMatrix(**{**own, **changes}))


def test_what_is_dequantised_is_a_quantised_matrix():
    with pytest.raises(TypeError, match="matrix is int; it must be a QuantisedMatrix"):
        distmoe.dequantise(3)
