"""A million draws over 151,936 tokens: where uniforms of too few bits are caught."""

import math

import pytest
import torch

from nano.sampling import noise

V = 151_936
NUM_DRAWS = 1_000_000
_ROWS = 64
_UNSIGNED = -(2**31)  # flips the sign bit: signed order becomes the order of the uniforms


def _smallest_bits(first: torch.Tensor, second: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """min over the tail of `random_bits`, per row; fused by the compiler, or it takes minutes."""
    bits = noise._mix(tail[None] * noise._as_int32(0x9E3779B1) + first[:, None])
    bits = noise._mix_(bits.bitwise_xor_(second[:, None]))
    return bits.bitwise_xor_(_UNSIGNED).amin(1).bitwise_xor_(_UNSIGNED)


@pytest.mark.slow
def test_one_token_at_one_half_beside_a_flat_tail_wins_half_of_a_million_races():
    head = torch.zeros(1, dtype=torch.int32)
    tail = torch.arange(1, V, dtype=torch.int32)
    smallest_bits = torch.compile(_smallest_bits, dynamic=False)
    head_bits, tail_bits = [], []
    for start in range(0, NUM_DRAWS, _ROWS):
        keys = [noise.row_keys(17, position) for position in range(start, start + _ROWS)]
        first, second = torch.tensor(keys, dtype=torch.int32).T.contiguous()
        tail_bits.append(smallest_bits(first, second, tail))
        head_bits.append(_smallest_bits(first, second, head))
    # The fused twin is the production function.
    assert int(tail_bits[0][3]) == min(
        noise.random_bits(17, 3, tail).tolist(), key=lambda bits: bits ^ _UNSIGNED
    )

    def head_share(log_exponential_from_bits) -> float:
        # p is 1/2 for the head and 1/2/(V-1) for each of the tail; the smallest E/p wins.
        race = log_exponential_from_bits(torch.cat(tail_bits)) + math.log(V - 1)
        return float((log_exponential_from_bits(torch.cat(head_bits)) < race).double().mean())

    sigma = 0.5 / math.sqrt(NUM_DRAWS)
    assert abs(head_share(noise.log_exponential_from_bits) - 0.5) < 4 * sigma

    def from_24_bits(bits: torch.Tensor) -> torch.Tensor:
        uniform = ((bits >> 8).bitwise_and(0xFFFFFF)).double() * 2.0**-24
        return (-torch.log1p(-uniform)).log()

    # The check has teeth: uniforms of 24 bits, zero included, fail it.
    assert abs(head_share(from_24_bits) - 0.5) > 4 * sigma
