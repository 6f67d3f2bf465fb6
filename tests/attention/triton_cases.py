"""The Triton kernels against textbook attention; test_triton_backend.py runs it, interpreted.

Values are rounded to the cache's dtype before they are given to the kernels, because the
interpreter truncates where a GPU rounds. Ranges and tiles are made small, so that short sequences
have many.
"""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from nano.attention import triton_backend
from nano.attention.reference_backend import ReferenceBackend
from nano.attention.triton_backend import Tile, TritonBackend
from nano.kv_spec import LayerKVSpec
from tests.attention import sequences as made
from tests.attention.sequences import Ranges, Sequences, ragged
from tests.triton_interpreter import mend_interpreter

mend_interpreter()

# (computed, scheduled): decode, one token, decode over two ranges, verification, a later chunk.
SHORT = [(7, 1), (0, 1), (34, 1), (12, 4), (28, 9)]
FLOAT32 = LayerKVSpec("layer", num_kv_heads=2, head_dim=8, dtype="float32")
LENGTHS = [1, 17, 40]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(made, "RAGGED", SHORT)
    monkeypatch.setattr(triton_backend, "RANGE", 32)
    monkeypatch.setattr(triton_backend, "tile_of", lambda *_: Tile(32, 16, 4, 1))


def rounded(sequences: Sequences, dtype: torch.dtype = torch.float32) -> Sequences:
    """With keys and values that the cache stores as they are, and queries of `dtype`."""
    cached = sequences.cache.dtype
    sequences.k, sequences.v = (
        [part.float().to(cached).double() for part in x] for x in (sequences.k, sequences.v)
    )
    sequences.q = [part.to(dtype).double() for part in sequences.q]
    sequences.dtype = dtype
    return sequences


def close(dtype: torch.dtype) -> dict[str, float]:
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    return {"rtol": bound, "atol": bound}


def ragged_step(
    spec: LayerKVSpec, dtype: torch.dtype, block_size: int, num_heads: int
) -> tuple[Sequences, Ranges]:
    """As `ragged`, with rounded values."""
    shape = sorted(SHORT, key=lambda request: request[1])
    lengths = [computed + scheduled for computed, scheduled in shape]
    sequences = rounded(Sequences(lengths, TritonBackend, spec, block_size, num_heads), dtype)
    earlier = [(i, 0, computed) for i, (computed, _) in enumerate(shape) if computed]
    sequences.step(sorted(earlier, key=lambda entry: entry[2]))
    return sequences, [(i, c, c + s) for i, (c, s) in enumerate(shape)]


@pytest.mark.parametrize(
    ("cached", "dtype", "head_dim", "num_heads", "num_kv_heads", "block_size", "full_grid"),
    [
        ("float32", torch.float32, 8, 6, 2, 1, 0),
        ("float32", torch.float32, 24, 9, 3, 3, 10**9),
        ("float32", torch.float32, 128, 2, 2, 256, 10**9),
        ("float32", torch.float32, 16, 40, 1, 16, 0),  # a group larger than the tile
        ("bfloat16", torch.float32, 80, 2, 1, 32, 0),
        ("bfloat16", torch.bfloat16, 64, 2, 1, 16, 10**9),
        ("float16", torch.float16, 64, 3, 1, 16, 0),
        ("float8_e4m3fn", torch.float32, 64, 2, 1, 16, 0),
    ],
)
def test_ragged_batches_equal_textbook_attention(
    cached, dtype, head_dim, num_heads, num_kv_heads, block_size, full_grid, monkeypatch
):
    monkeypatch.setattr(triton_backend, "_FULL_GRID", full_grid)
    spec = LayerKVSpec("layer", num_kv_heads, head_dim, cached)
    sequences, ranges = ragged_step(spec, dtype, block_size, num_heads)
    out = sequences.step(ranges, num_padding=3)
    assert (out[-3:] == 77.0).all()
    wanted = torch.cat([sequences.expected(i)[start:end] for i, start, end in ranges])
    torch.testing.assert_close(out[:-3].double(), wanted, **close(dtype))


def test_ragged_batches_equal_the_reference_backend():
    ours, ranges = ragged(TritonBackend, FLOAT32, 4)
    theirs, _ = ragged(ReferenceBackend, FLOAT32, 4)
    torch.testing.assert_close(ours.step(ranges), theirs.step(ranges), **close(torch.float32))


def test_foreign_blocks_are_untouched():
    sequences, ranges = ragged(TritonBackend, FLOAT32, 4)
    out = sequences.step(ranges, num_padding=5)
    assert not out[:-5].isnan().any()
    written = sum(end for _, _, end in ranges) * 2 * FLOAT32.num_kv_heads * FLOAT32.head_dim
    assert int((~sequences.cache.isnan()).sum()) == written


def test_a_request_reads_kv_that_another_writes_in_the_same_step():
    sequences = Sequences([6, 8], TritonBackend, FLOAT32, block_size=4)
    for x in (sequences.k, sequences.v):
        x[0][:4] = x[1][:4]
    sequences.blocks[0][0] = sequences.blocks[1][0]  # shared; only request 1 computes it
    out = sequences.step([(0, 4, 6), (1, 0, 8)])
    wanted = torch.cat([sequences.expected(0)[4:], sequences.expected(1)])
    torch.testing.assert_close(out.double(), wanted, **close(torch.float32))


def test_tokens_may_be_views_into_a_fused_projection():
    sequences = Sequences([10], TritonBackend, FLOAT32)
    ranges = [(0, 0, 10)]
    wanted = sequences.step(ranges)
    parts = [sequences.gather(x, ranges) for x in (sequences.q, sequences.k, sequences.v)]
    fused = torch.cat([part.flatten(1) for part in parts], 1)
    sizes = [part[0].numel() for part in parts]
    views = [part.unflatten(1, (-1, 8)) for part in fused.split(sizes, 1)]
    out = torch.empty(10, 9, 8)[:, 2:8]
    sequences.backend.forward(*views, sequences.cache, out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_a_number_spoils_neither_those_before_it_nor_its_neighbours(
    bad,
):
    ranges = [(0, 0, 10), (1, 0, 40)]
    clean = Sequences([10, 40], TritonBackend, FLOAT32).step(ranges)
    for keys_too in (True, False):
        spoilt = Sequences([10, 40], TritonBackend, FLOAT32)
        spoilt.v[1][7, :, 3] = bad
        if keys_too:
            spoilt.k[1][7] = bad
        out = spoilt.step(ranges)
        assert torch.equal(out[:17], clean[:17])
        assert out[17:].isnan().all()


def test_a_value_that_the_cache_cannot_hold_spoils_those_who_see_it():
    spec = dataclasses.replace(FLOAT32, dtype="float16")
    sequences = Sequences([20], TritonBackend, spec)
    sequences.dtype = torch.float32
    sequences.v[0][7, 0, 3] = 65519.0  # half a step beyond the largest; rounds down to it
    assert not sequences.step([(0, 0, 20)]).isnan().any()
    sequences.v[0][7, 0, 3] = 65520.0
    out = sequences.step([(0, 0, 20)])
    assert not out[:7].isnan().any()
    assert out[7:, :3].isnan().all()  # of that KV head
    assert not out[:, 3:].isnan().any()


def in_parts(sequences: Sequences, request: int, cuts: list[int]) -> Tensor:
    """One request alone, cut before each of `cuts`."""
    length = len(sequences.q[request])
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    return torch.cat([sequences.step([(request, *pair)]) for pair in itertools.pairwise(bounds)])


@pytest.mark.parametrize(("block_size", "full_grid"), [(3, 0), (64, 10**9)])
def test_a_row_has_the_same_bits_in_any_batch_chunk_and_block_size(
    block_size, full_grid, monkeypatch
):
    """In the interpreter: that the order of sums is what it should be. Only a GPU shows its own."""
    spec = dataclasses.replace(FLOAT32, head_dim=32)
    together = Sequences(LENGTHS, TritonBackend, spec)
    wanted = together.step([(i, 0, n) for i, n in enumerate(LENGTHS)]).split(LENGTHS)
    monkeypatch.setattr(triton_backend, "_FULL_GRID", full_grid)
    for cuts in ([1, 2, 16, 37, 38, 39], [33]):
        sequences = Sequences(LENGTHS, TritonBackend, spec, block_size)
        for i in range(len(LENGTHS)):
            assert torch.equal(in_parts(sequences, i, cuts), wanted[i]), (i, cuts)


def test_ranges_computed_apart_give_the_same_bits(monkeypatch):
    outputs = []
    for full_grid in (0, 10**9):
        monkeypatch.setattr(triton_backend, "_FULL_GRID", full_grid)
        sequences, ranges = ragged_step(FLOAT32, torch.float32, 16, 6)
        outputs.append(sequences.step(ranges))
    assert torch.equal(*outputs)


def test_a_captured_launch_serves_fewer_requests_when_replayed():
    """What a CUDA graph does: the launch of four requests, over buffers with two in them."""
    lengths = [20, 30, 13, 25]
    sequences = Sequences(lengths, TritonBackend, FLOAT32)
    sequences.step(sorted([(i, 0, n - 2) for i, n in enumerate(lengths)], key=lambda x: x[2]))
    wanted = torch.cat([sequences.expected(i)[-2:] for i in (2, 0)])
    everybody = [(i, n - 2, n) for i, n in enumerate(lengths)]
    sequences.step(everybody)
    backend = sequences.backend
    captured = backend._num_requests, backend._table, backend._slots

    few = [(2, 11, 13), (0, 18, 20)]
    sequences.plan(few, num_padding=4)
    captured[1][:2, : backend._table.shape[1]] = backend._table
    captured[2].copy_(backend._slots)
    backend._num_requests, backend._table, backend._slots = captured
    q, k, v = (sequences.gather(x, few, 4) for x in (sequences.q, sequences.k, sequences.v))
    out = torch.full_like(q, 77.0)
    backend.forward(q, k, v, sequences.cache, out)
    assert (out[4:] == 77.0).all()
    torch.testing.assert_close(out[:4].double(), wanted, **close(torch.float32))
