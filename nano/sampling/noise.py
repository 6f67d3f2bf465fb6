"""Noise keyed by (seed, position, token id): the only randomness in the engine.

cpu_sampling.cpp computes the same bits; the logarithms may differ in the last place.

Sampling is an exponential race: token v wins where E_v / p_v is smallest, E_v ~ Exp(1), which
happens with probability p_v. The noise of a position is a pure function of its key, so it is the
same alone or in a batch, in a chunk or a draft, before and after preemption.

E = -log1p(-u) with u = (bits + 0.5) * 2**-32. Uniforms of 24 bits would not do: over a vocabulary
of 152k about 1 % of rows would then hold a u of exactly zero, which wins at any probability.

A request's seed as it is keys the target's own noise. What else is random about a request has a
domain, and a seed derived for it, so that no two purposes ever share a number.
"""

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # float32 rounds the last 128 of the 2**32 values up to 1


class NoiseDomain(IntEnum):
    """What noise beside the target's own is for."""

    DRAFT = 1  # draws drafts
    ACCEPTANCE = 2  # judges them
    RESIDUAL = 3  # draws the token behind those accepted


def domain_seeds(seeds: np.ndarray, domain: NoiseDomain, counters: np.ndarray | int) -> np.ndarray:
    """Seeds of `domain`, apart from `seeds` and from those of other domains and counters.

    seeds: [N] int64; counters: [N] int64 or one for all, at least 0; the result: [N] int64.
    """
    return _scramble(_scramble(seeds, domain), counters).view(np.int64)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[N] float64 in (0, 1), multiples of 2**-53, one per (seed, position). int64 [N] both."""
    # 52 bits and a half are exact in float64; one bit more would round some up to 1.
    return ((_scramble(seeds, positions) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _scramble(seeds: np.ndarray, indices: np.ndarray | int) -> np.ndarray:
    """[N] uint64: what `row_keys` computes, in numpy."""
    steps = np.atleast_1d(np.asarray(indices, np.int64)).astype(np.uint64) + np.uint64(1)
    words = seeds.astype(np.uint64) + np.uint64(_GOLDEN) * steps
    for _ in range(2):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        words ^= words >> np.uint64(31)
    return words


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """Two int32 keys for one row: (seed, position) through the splitmix64 finaliser, twice."""
    word = (seed + _GOLDEN * (position + 1)) & _MASK64
    for _ in range(2):
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
        word ^= word >> 31
    return _as_int32(word >> 32), _as_int32(word)


def keys_of_rows(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`row_keys` of many rows at once. [L] int64 both -> [2, L] int32."""
    words = _scramble(seeds, positions)
    return np.stack([words >> np.uint64(32), words]).astype(np.uint32).view(np.int32)


def random_bits(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """32 random bits per token. token_ids, result: [N] int32, any ids."""
    return bits_of_keys(*row_keys(seed, position), token_ids)


def bits_of_keys(first: int | Tensor, second: int | Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits per token, [N] int32; [L, N] where the keys are [L, 1] int32."""
    bits = _mix(token_ids * _as_int32(0x9E3779B1) + first)
    return _mix_(bits.bitwise_xor_(second))


def log_exponential(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """log E per token, [N] float32, finite: the race is run as argmax(logit - log E)."""
    return log_exponential_from_bits(random_bits(seed, position, token_ids))


def log_exponential_from_bits(bits: Tensor) -> Tensor:
    """log E for given bits. int32 [N] -> float32 [N], in [log 2**-33, log 16.7]."""
    # Split in halves, so that a small u keeps all of float32's relative precision.
    high = (bits >> 16).bitwise_and_(0xFFFF).to(torch.float32)
    low = bits.bitwise_and(0xFFFF).to(torch.float32).add_(0.5)
    uniform = high.mul_(65536.0).add_(low).mul_(2.0**-32)
    uniform.clamp_(max=_LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_().log_()


def _mix(x: Tensor) -> Tensor:
    return _mix_(x.clone())


def _mix_(x: Tensor) -> Tensor:
    """A bijective 32-bit finaliser (constants: C. Wellons, hash-prospector), in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, _as_int32(0x846CA68B))):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))  # a logical shift
        x.mul_(factor)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _as_int32(word: int) -> int:
    """The low 32 bits as a signed integer."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word
