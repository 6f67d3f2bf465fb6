"""What naming KV blocks costs: a whole prompt at admission, one block as decoding fills it.

pytest bench/bench_block_hash.py
"""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nano.kv_cache.block_hash import chain_root, hash_blocks

ROOT = chain_root("bench")


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("num_tokens", [2048, 32768])
def test_hashing_a_prompt(benchmark: BenchmarkFixture, num_tokens: int, block_size: int) -> None:
    token_ids = [(7919 * index) % 151_936 for index in range(num_tokens)]
    benchmark.extra_info["num_tokens"] = num_tokens
    hashes = benchmark(hash_blocks, ROOT, token_ids, block_size, 0, num_tokens)
    assert len(hashes) == num_tokens // block_size


def test_hashing_the_one_block_that_a_decode_step_fills(benchmark: BenchmarkFixture) -> None:
    token_ids = [(7919 * index) % 151_936 for index in range(4096)]
    assert len(benchmark(hash_blocks, ROOT, token_ids, 16, 4080, 4096)) == 1
