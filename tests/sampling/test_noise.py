"""The noise behind every sampled token: exact where it is rare, uniform where it is common."""

import math

import numpy as np
import pytest
import torch

from nano.sampling import noise
from nano.sampling.noise import (
    NoiseDomain,
    domain_seeds,
    log_exponential,
    log_exponential_from_bits,
    random_bits,
    row_keys,
    uniforms,
)


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


def test_every_domain_and_counter_has_a_seed_of_its_own():
    user_seeds = np.concatenate((np.arange(-50, 50), [2**63 - 1, -(2**63)]))
    seen = set(user_seeds.tolist())
    for domain in NoiseDomain:
        for counter in range(50):
            seen.update(domain_seeds(user_seeds, domain, counter).tolist())
    assert len(seen) == len(user_seeds) * (1 + len(NoiseDomain) * 50)


def test_a_derived_seed_depends_on_its_own_key_alone():
    seeds, counters = np.array([7, 8, 7]), np.array([0, 5, 5])
    together = domain_seeds(seeds, NoiseDomain.DRAFT, counters)
    for i in range(3):
        alone = domain_seeds(seeds[i : i + 1], NoiseDomain.DRAFT, int(counters[i]))
        assert alone[0] == together[i]


def test_keys_in_numpy_are_those_of_single_rows():
    for seed, position in ((0, 0), (5, 17), (-1, 2**40), (2**63 - 1, 3)):
        word = int(noise._scramble(np.array([seed]), np.array([position]))[0])
        first, second = row_keys(seed, position)
        assert (word >> 32, word & 0xFFFFFFFF) == (first & 0xFFFFFFFF, second & 0xFFFFFFFF)


def test_uniforms_lie_inside_zero_and_one_whatever_the_bits(monkeypatch):
    words = np.array([0, 1, 2**12, 2**64 - 1, 2**63], np.uint64)
    monkeypatch.setattr(noise, "_scramble", lambda seeds, positions: words)
    u = uniforms(words, words)
    assert (u > 0).all()
    assert (u < 1).all()
    assert u[0] == 2.0**-53
    assert u[3] == 1 - 2.0**-53


@pytest.mark.parametrize("axis", ["seed", "position", "domain", "counter"])
def test_uniforms_are_uniform_and_uncorrelated_along_each_key(axis: str):
    n = 1 << 15
    index = np.arange(n)
    if axis == "seed":
        u = uniforms(domain_seeds(index, NoiseDomain.ACCEPTANCE, 3), np.full(n, 2))
    elif axis == "position":
        u = uniforms(domain_seeds(np.full(n, 9), NoiseDomain.ACCEPTANCE, 0), index)
    elif axis == "counter":
        u = uniforms(domain_seeds(np.full(n, 9), NoiseDomain.ACCEPTANCE, index), np.full(n, 2))
    else:  # neighbours are two domains of one request
        pairs = [domain_seeds(index[: n // 2], domain, 4) for domain in list(NoiseDomain)[:2]]
        u = uniforms(np.stack(pairs, axis=1).ravel(), np.full(n, 2))
    counts = np.bincount((u * 256).astype(int), minlength=256)
    chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / math.sqrt(n)


def test_many_rows_have_the_noise_that_each_has_alone():
    seeds, positions = np.array([[0, 7, 2**63 - 1, -(2**63), -1], [0, 12345, 131071, 1, 3]])
    ids = torch.arange(50, dtype=torch.int32)
    first, second = torch.from_numpy(noise.keys_of_rows(seeds, positions))[:, :, None].unbind()
    together = noise.bits_of_keys(first, second, ids)
    for row, seed, position in zip(together, seeds.tolist(), positions.tolist()):
        assert torch.equal(row, random_bits(seed, position, ids))
