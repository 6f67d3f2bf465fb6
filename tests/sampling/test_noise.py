"""The noise behind every sampled token: exact where it is rare, uniform where it is common."""

import math

import numpy as np
import pytest
import torch

from nano.sampling.noise import log_exponential, log_exponential_from_bits, random_bits


def int32(words: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32).copy())


def test_every_bit_pattern_gives_finite_noise_close_to_the_float64_formula():
    words = [0, 1, 2, 3, 127, 128, 2**16 - 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**31 + 1]
    words += np.random.default_rng(0).integers(0, 2**32 - 2**20, 20_000).tolist()
    u = (np.array(words, dtype=np.float64) + 0.5) * 2.0**-32
    exact = np.log(-np.log1p(-u))
    ours = log_exponential_from_bits(int32(words)).numpy()
    np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-6)


def test_the_largest_bit_patterns_give_large_but_finite_noise():
    ours = log_exponential_from_bits(int32([2**32 - 1, 2**32 - 64, 2**32 - 128]))
    assert torch.isfinite(ours).all()
    assert (ours > math.log(16.0)).all()


def test_the_smallest_uniform_is_never_zero_and_keeps_its_precision():
    smallest = log_exponential_from_bits(int32([0, 1, 2]))
    expected = np.log(np.array([0.5, 1.5, 2.5]) * 2.0**-32)
    np.testing.assert_allclose(smallest.numpy(), expected, rtol=1e-6)


def test_noise_depends_on_seed_position_and_token_alone():
    ids = torch.arange(1000, dtype=torch.int32)
    whole = log_exponential(7, 11, ids)
    picked = torch.tensor([999, 0, 512], dtype=torch.int32)
    assert torch.equal(log_exponential(7, 11, picked), whole[picked.long()])
    assert not torch.equal(log_exponential(8, 11, ids), whole)
    assert not torch.equal(log_exponential(7, 12, ids), whole)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_bits_are_uniform_and_uncorrelated_along_each_key(axis: str):
    n = 1 << 15
    if axis == "token":
        bits = random_bits(3, 5, torch.arange(n, dtype=torch.int32))
    else:
        one = torch.tensor([42], dtype=torch.int32)
        keys = [(i, 5) if axis == "seed" else (3, i) for i in range(n)]
        bits = torch.cat([random_bits(seed, position, one) for seed, position in keys])
    words = bits.numpy().view(np.uint32)
    # Each of the 32 bits is a fair coin, alone and against its predecessor's: 64 tests, 5 sigma.
    for bit in range(32):
        coins = (words >> np.uint32(bit)) & 1
        assert abs(coins.mean() - 0.5) < 5 * 0.5 / math.sqrt(n)
        assert abs((coins[1:] == coins[:-1]).mean() - 0.5) < 5 * 0.5 / math.sqrt(n)
    counts = np.bincount(words >> np.uint32(24), minlength=256)
    chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_the_smallest_of_many_exponentials_is_exponential():
    # min of V Exp(1) is Exp(V): the property that a flat tail of a large vocabulary relies on,
    # and that a uniform with too few bits breaks first.
    vocabulary = torch.arange(151_936, dtype=torch.int32)
    smallest = [float(log_exponential(1, t, vocabulary).min()) for t in range(800)]
    scaled = np.sort(np.exp(np.array(smallest)) * len(vocabulary))
    empirical = (np.arange(len(scaled)) + 0.5) / len(scaled)
    distance = np.abs(1 - np.exp(-scaled) - empirical).max()
    assert distance < 1.95 / math.sqrt(len(scaled))  # Kolmogorov-Smirnov at p = 0.001
