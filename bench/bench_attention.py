"""Attention at the shapes of SmolLM2-135M: our kernel and torch's, beside what the machine can do.

OMP_WAIT_POLICY=passive pytest bench/bench_attention.py --benchmark-disable-gc -s

Caches together exceed the last-level cache, as a model's layers do. Below each case: bytes of keys
and values read a second, and useful operations, with their shares of what torch reaches in a plain
sum over memory and in a large matrix product, on as many threads.
"""

import time
from collections.abc import Callable
from functools import cache

import pytest
import torch

from nano.attention.cpu_backend import CpuBackend
from nano.attention.torch_backend import TorchBackend
from nano.kv_spec import LayerKVSpec
from nano.native.build import load_threads
from tests.attention.sequences import Sequences
from tests.attention.test_paired_attention import PairedBackend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
COLD_BYTES = 100_000_000  # of caches that are read in turn
# (requests, tokens of each, of which new): decode, verification, a whole prompt, a later chunk
CASES = [
    (1, 128, 1),
    (1, 2048, 1),
    (1, 16384, 1),
    (8, 512, 1),
    (32, 512, 1),
    (8, 512, 5),
    (1, 512, 512),
    (1, 2048, 2048),
    (1, 4096, 512),
]


@pytest.fixture(params=[1, 2])
def num_threads(request):
    pool, before = load_threads(), torch.get_num_threads()
    pool.nano_set_num_threads(request.param)
    torch.set_num_threads(request.param)
    yield request.param
    pool.nano_set_num_threads(1)
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (CpuBackend, "float32"),
        (CpuBackend, "bfloat16"),
        (PairedBackend, "bfloat16"),
        (TorchBackend, "float32"),
    ],
    ids=["cpu", "cpu-bfloat16", "cpu-paired", "torch"],
)
@pytest.mark.parametrize(("num_requests", "seq_len", "query_len"), CASES)
def test_attention(
    benchmark, capsys, backend, dtype, num_requests: int, seq_len: int, query_len: int, num_threads
):
    spec = LayerKVSpec("layer", NUM_KV_HEADS, HEAD_DIM, dtype)
    sequences = Sequences([seq_len] * num_requests, backend, spec, num_heads=NUM_HEADS)
    ranges = [(i, seq_len - query_len, seq_len) for i in range(num_requests)]
    sequences.plan(ranges)
    num_caches = COLD_BYTES // sequences.cache.nbytes + 1
    caches = [sequences.cache.clone().fill_(0.5) for _ in range(num_caches)]
    q, k, v = (sequences.gather(x, ranges) for x in (sequences.q, sequences.k, sequences.v))
    out = torch.empty_like(q)
    forward = sequences.backend.forward
    benchmark(lambda: [forward(q, k, v, kv_cache, out) for kv_cache in caches])

    seconds = benchmark.stats.stats.min / num_caches
    num_bytes = num_requests * seq_len * spec.bytes_per_block(1)
    num_pairs = num_requests * query_len * (2 * seq_len - query_len + 1) / 2
    bandwidth = num_bytes / seconds / 1e9
    rate = 4 * num_pairs * NUM_HEADS * HEAD_DIM / seconds / 1e9
    with capsys.disabled():
        print(
            f"\n{seconds * 1e6:.1f} us a layer;"
            f" {bandwidth:.1f} GB/s, {bandwidth / stream_bandwidth(num_threads):.0%};"
            f" {rate:.1f} GFLOP/s, {rate / matmul_rate(num_threads):.0%}"
        )


@cache
def stream_bandwidth(num_threads: int) -> float:
    """GB/s of a sum over 200 MB."""
    x = torch.ones(50_000_000)
    return x.nbytes / least_seconds(lambda: x.sum()) / 1e9


@cache
def matmul_rate(num_threads: int) -> float:
    """GFLOP/s of a matrix product."""
    x, y = torch.ones(1024, 1024), torch.ones(1024, 1024)
    return 2 * 1024**3 / least_seconds(lambda: x @ y) / 1e9


def least_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(8):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
