"""A row is the same bits however it is computed: the promise of the exact backends, bit by bit."""

import dataclasses
import itertools
import os

import pytest
import torch
from torch import Tensor

from nano.attention.cpu_backend import CpuBackend
from nano.attention.exact_torch_backend import ExactTorchBackend
from nano.native.build import cpu_name, load_threads
from tests.attention.sequences import SPEC, Sequences, ragged_outputs
from tests.attention.test_backends import BFLOAT16, FLOAT32, needs_kernel
from tests.other_cpus import AVX2, PLAIN, computed_with, needs_x86

LENGTHS = [1, 15, 16, 17, 40, 70, 270]
FEW_LENGTHS = [1, 17, 100]  # for the slow one
# (backend, what it caches, head_dim, lengths of requests)
KINDS = [
    *(
        pytest.param(CpuBackend, dtype, dim, LENGTHS, id=f"cpu-{dtype}-{dim}", marks=needs_kernel)
        for dtype in ("float32", "bfloat16")
        for dim in (8, 24, 64)
    ),
    pytest.param(ExactTorchBackend, "float32", 64, FEW_LENGTHS, id="torch-exact-float32"),
    pytest.param(ExactTorchBackend, "bfloat16", 24, FEW_LENGTHS, id="torch-exact-bfloat16"),
]


@pytest.fixture(params=[1, 2, 3])
def num_threads(request):
    """So many threads of our pool, and of torch's."""
    before, pool = torch.get_num_threads(), load_threads()
    torch.set_num_threads(request.param)
    if pool is None:
        yield request.param
    else:
        pool_before = pool.nano_num_threads()
        pool.nano_set_num_threads(request.param)
        yield request.param
        pool.nano_set_num_threads(pool_before)
    torch.set_num_threads(before)


def whole(backend, spec, lengths: list[int], **shape) -> list[Tensor]:
    """All requests, each in one piece, in one batch."""
    ranges = [(i, 0, n) for i, n in enumerate(lengths)]
    return list(Sequences(lengths, backend, spec, **shape).step(ranges).split(lengths))


def in_parts(sequences: Sequences, request: int, cuts: list[int]) -> Tensor:
    """One request alone, cut before each of `cuts`."""
    length = len(sequences.q[request])
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    return torch.cat([sequences.step([(request, *pair)]) for pair in itertools.pairwise(bounds)])


@pytest.mark.parametrize(("backend", "dtype", "head_dim", "lengths"), KINDS)
def test_a_row_has_the_same_bits_in_any_batch_and_chunk(
    backend, dtype, head_dim, lengths, num_threads
):
    spec = dataclasses.replace(SPEC, head_dim=head_dim, dtype=dtype)
    wanted = whole(backend, spec, lengths)
    ways = {
        "decoded": [*range(20), *range(60, 70), *range(260, 270)],
        "in chunks of 3": [*range(0, 70, 3)],
        "in chunks of 16": [*range(0, 270, 16)],
        "in chunks of 33": [*range(0, 270, 33)],
        "cut at 256": [256],
    }
    for way, cuts in ways.items():
        sequences = Sequences(lengths, backend, spec)
        for i in range(len(lengths)):
            assert torch.equal(in_parts(sequences, i, cuts), wanted[i]), f"request {i}, {way}"


@pytest.mark.parametrize(("backend", "dtype", "head_dim", "lengths"), KINDS)
@pytest.mark.parametrize("block_size", [1, 3, 32, 256])
def test_a_row_has_the_same_bits_in_blocks_of_any_size(
    backend, dtype, head_dim, lengths, block_size
):
    spec = dataclasses.replace(SPEC, head_dim=head_dim, dtype=dtype)
    wanted = whole(backend, spec, lengths)
    for ours, theirs in zip(whole(backend, spec, lengths, block_size=block_size), wanted):
        assert torch.equal(ours, theirs)
    sequences = Sequences(lengths, backend, spec, block_size)
    for i in range(len(lengths)):
        assert torch.equal(in_parts(sequences, i, [5, 17, 18, 255, 256, 269]), wanted[i])


@needs_kernel
@pytest.mark.parametrize("spec", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_heads", [2, 14])
def test_a_long_request_has_the_same_bits_alone_in_a_batch_and_on_any_threads(
    spec, num_heads, num_threads
):
    """Where threads outnumber requests, the kernel deals out the ranges of one request's keys."""
    pool = load_threads()
    lengths = [900, 1, 300, 5]
    sequences = Sequences(lengths, CpuBackend, spec, num_heads=num_heads)
    sequences.step([(3, 0, 4), (2, 0, 299), (0, 0, 890)])
    together = sequences.step([(1, 0, 1), (3, 4, 5), (2, 299, 300), (0, 890, 900)])
    alone = Sequences(lengths, CpuBackend, spec, num_heads=num_heads)
    pool.nano_set_num_threads(1)
    wanted = in_parts(alone, 0, [400])[890:]
    pool.nano_set_num_threads(num_threads)
    assert torch.equal(together[-10:], wanted)
    assert torch.equal(sequences.step([(0, 890, 900)]), wanted)
    for i in range(10):
        assert torch.equal(sequences.step([(0, 890 + i, 891 + i)])[0], wanted[i])


@needs_kernel
def test_a_bfloat16_cache_computes_what_a_float32_cache_of_rounded_values_does():
    rounded, exact = (Sequences(LENGTHS, CpuBackend, spec) for spec in (BFLOAT16, FLOAT32))
    ranges = [(i, 0, n) for i, n in enumerate(LENGTHS)]
    unlike = exact.step(ranges)
    for x in (exact.k, exact.v):
        x[:] = [part.float().bfloat16().double() for part in x]
    out = rounded.step(ranges)
    assert torch.equal(out, exact.step(ranges))
    assert not torch.equal(out, unlike)


def results() -> dict[tuple[str, int, int], Tensor]:
    return ragged_outputs(CpuBackend)


@needs_kernel
@pytest.mark.slow
@pytest.mark.skipif("avx512vl" not in cpu_name(), reason="needs two vector widths")
@pytest.mark.skipif("NANO_CPU_FLAGS" in os.environ, reason="the width is told")
def test_vectors_of_either_width_give_the_same_bits():
    wide, narrow = results(), computed_with(AVX2, results)
    assert wide.keys() == narrow.keys()
    for key, out in wide.items():
        assert torch.equal(out, narrow[key]), key


@needs_kernel
@pytest.mark.slow
@needs_x86
def test_a_cpu_without_fused_multiply_adds_is_served_too():
    ours, plain = results(), computed_with(PLAIN, results)
    assert ours.keys() == plain.keys()
    for key, out in ours.items():
        torch.testing.assert_close(plain[key], out, rtol=5e-6, atol=5e-6)
