"""Every backend against plain softmax on ragged batches; the native one bit by bit, too."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionMetadata
from nano.attention.cpu_backend import CpuBackend
from nano.attention.op import ForwardContext, attention, forward_context
from nano.attention.reference_backend import ReferenceBackend
from nano.attention.select import select_backend
from nano.attention.torch_backend import TorchBackend
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec

CPU = torch.device("cpu")
SPEC = LayerKVSpec("layer", num_kv_heads=2, head_dim=8, dtype="float64")
NATIVE = dataclasses.replace(SPEC, dtype="float32")
NUM_HEADS = 6
# (computed, scheduled): decode, verification, first chunk, later chunk, whole prompt, one token
RAGGED = [(7, 1), (40, 1), (12, 4), (0, 9), (16, 16), (0, 33), (0, 1)]

needs_kernel = pytest.mark.skipif(
    CpuBackend.unsupported_reason(NATIVE, CPU) is not None,
    reason=str(CpuBackend.unsupported_reason(NATIVE, CPU)),
)
# (backend, what it computes in, how close it comes to float64)
BACKENDS = [
    pytest.param(ReferenceBackend, SPEC, 1e-12, id="reference"),
    pytest.param(TorchBackend, SPEC, 1e-12, id="torch"),
    pytest.param(CpuBackend, NATIVE, 2e-6, id="cpu", marks=needs_kernel),
]


class Sequences:
    """Queries, keys and values of some requests, and their places in a paged cache."""

    def __init__(
        self,
        lengths: list[int],
        backend_class: type[AttentionBackend],
        spec: LayerKVSpec,
        block_size: int = 16,
        num_heads: int = NUM_HEADS,
    ):
        self.spec, self.num_heads, self.block_size = spec, num_heads, block_size
        self.dtype = getattr(torch, spec.dtype)
        self.backend = backend_class(block_size, spec.head_dim**-0.5)
        counts = [-(-length // block_size) for length in lengths]
        self.num_blocks = sum(counts) + 3
        order = torch.Generator().manual_seed(5)
        shuffled = torch.randperm(self.num_blocks, generator=order).tolist()
        self.blocks = [[shuffled.pop() for _ in range(count)] for count in counts]
        self.unused_blocks = shuffled
        shape = backend_class(block_size, 1.0).kv_cache_shape(spec, self.num_blocks)
        self.cache = torch.full(shape, float("nan"), dtype=self.dtype)

        generator = torch.Generator().manual_seed(6)  # contents do not depend on the layout

        def random(heads: int) -> list[Tensor]:
            kind = {"generator": generator, "dtype": torch.float64}
            return [torch.randn(n, heads, spec.head_dim, **kind) for n in lengths]

        self.q, self.k, self.v = (random(h) for h in (num_heads, *[spec.num_kv_heads] * 2))

    def plan(self, ranges: list[tuple[int, int, int]], num_padding: int = 0) -> None:
        """A step that computes (request, start, end) tokens; short queries must come first."""
        slots = [
            self.blocks[request][p // self.block_size] * self.block_size + p % self.block_size
            for request, start, end in ranges
            for p in range(start, end)
        ]
        counts = [end - start for _, start, end in ranges]
        assert counts == sorted(counts)
        widest = max(len(self.blocks[request]) for request, _, _ in ranges)
        table = torch.zeros(len(ranges), widest, dtype=torch.int32)
        for row, (request, _, _) in enumerate(ranges):
            table[row, : len(self.blocks[request])] = torch.tensor(self.blocks[request])
        self.backend.plan(
            AttentionMetadata(
                num_requests=len(ranges),
                num_tokens=sum(counts),
                max_query_len=max(counts),
                max_seq_len=max(end for _, _, end in ranges),
                num_decode_requests=counts.count(1),
                query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
                seq_lens=np.array([end for _, _, end in ranges], np.int32),
                block_table=table,
                slot_mapping=torch.tensor(slots + [-1] * num_padding),
            )
        )

    def gather(self, x: list[Tensor], ranges: list[tuple[int, int, int]], num_padding: int):
        parts = [x[request][start:end] for request, start, end in ranges]
        return torch.cat([*parts, x[0][:1].expand(num_padding, -1, -1)]).to(self.dtype)

    def step(self, ranges: list[tuple[int, int, int]], num_padding: int = 0) -> Tensor:
        """The output rows of one step, padding rows last."""
        self.plan(ranges, num_padding)
        q, k, v = (self.gather(x, ranges, num_padding) for x in (self.q, self.k, self.v))
        out = torch.full_like(q, 77.0)
        self.backend.forward(q, k, v, self.cache, out)
        return out

    def expected(self, request: int) -> Tensor:
        """Textbook causal attention of a whole request in float64, with no cache at all."""
        group = self.num_heads // self.spec.num_kv_heads
        k, v = (x[request].repeat_interleave(group, dim=1) for x in (self.k, self.v))
        scores = torch.einsum("qhd,khd->hqk", self.q[request], k) * self.spec.head_dim**-0.5
        future = torch.ones(len(k), len(k), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def ragged(backend, spec, block_size: int, **kind) -> tuple[Sequences, list[tuple[int, int, int]]]:
    """The sequences of RAGGED with what is computed already in the cache, and their next step."""
    shape = sorted(RAGGED, key=lambda request: request[1])
    sequences = Sequences([c + s for c, s in shape], backend, spec, block_size, **kind)
    earlier = [(i, 0, computed) for i, (computed, _) in enumerate(shape) if computed]
    sequences.step(sorted(earlier, key=lambda entry: entry[2]))
    return sequences, [(i, c, c + s) for i, (c, s) in enumerate(shape)]


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_ragged_batches_equal_textbook_attention(backend, spec, close, block_size):
    sequences, ranges = ragged(backend, spec, block_size)
    out = sequences.step(ranges)
    wanted = torch.cat([sequences.expected(i)[start:end] for i, start, end in ranges])
    torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close)


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
def test_padding_rows_and_foreign_blocks_are_untouched(backend, spec, close):
    sequences, ranges = ragged(backend, spec, 4)
    out = sequences.step(ranges, num_padding=5)
    assert (out[-5:] == 77.0).all()
    assert not out[:-5].isnan().any()
    written = sum(end for _, _, end in ranges) * 2 * spec.num_kv_heads * spec.head_dim
    assert int((~sequences.cache.isnan()).sum()) == written


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
def test_a_request_reads_kv_that_another_writes_in_the_same_step(backend, spec, close):
    sequences = Sequences([6, 8], backend, spec, block_size=4)
    for x in (sequences.k, sequences.v):
        x[0][:4] = x[1][:4]
    sequences.blocks[0][0] = sequences.blocks[1][0]  # shared; only request 1 computes it
    out = sequences.step([(0, 4, 6), (1, 0, 8)])
    wanted = torch.cat([sequences.expected(0)[4:], sequences.expected(1)])
    torch.testing.assert_close(out.double(), wanted, rtol=close, atol=close)


@needs_kernel
@pytest.mark.parametrize("head_dim", [8, 24, 64, 72, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (14, 2)])
def test_the_kernel_serves_every_head_size(head_dim, num_heads, num_kv_heads):
    spec = LayerKVSpec("layer", num_kv_heads, head_dim, "float32")
    sequences, ranges = ragged(CpuBackend, spec, 16, num_heads=num_heads)
    out = sequences.step(ranges)
    wanted = torch.cat([sequences.expected(i)[start:end] for i, start, end in ranges])
    torch.testing.assert_close(out.double(), wanted, rtol=5e-6, atol=5e-6)


@needs_kernel
@pytest.mark.parametrize("head_dim", [24, 64])
def test_a_row_has_the_same_bits_in_any_batch_chunk_block_size_and_thread_count(head_dim):
    spec = dataclasses.replace(NATIVE, head_dim=head_dim)
    lengths = [1, 15, 16, 17, 40, 70]

    def sequences(block_size: int = 16) -> Sequences:
        return Sequences(lengths, CpuBackend, spec, block_size)

    whole = sequences().step([(i, 0, n) for i, n in enumerate(lengths)])
    wanted = list(whole.split(lengths))
    before = torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for block_size in (1, 5, 16, 64):
            for i, n in enumerate(lengths):  # alone, token by token
                alone = sequences(block_size)
                rows = [alone.step([(i, p, p + 1)]) for p in range(n)]
                assert torch.equal(torch.cat(rows), wanted[i])
        for chunk in (3, 4, 16, 33):  # in chunks
            cut = sequences()
            for i, n in enumerate(lengths):
                parts = [cut.step([(i, p, min(p + chunk, n))]) for p in range(0, n, chunk)]
                assert torch.equal(torch.cat(parts), wanted[i])
    torch.set_num_threads(before)


@pytest.mark.parametrize(("backend", "spec", "close"), BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_a_number_spoils_neither_those_before_it_nor_its_neighbours(
    backend, spec, close, bad
):
    ranges = [(0, 0, 20), (1, 0, 30)]
    clean = Sequences([20, 30], backend, spec).step(ranges)
    spoilt = Sequences([20, 30], backend, spec)
    spoilt.k[1][7], spoilt.v[1][7] = bad, bad
    out = spoilt.step(ranges)
    torch.testing.assert_close(out[:27], clean[:27], rtol=close, atol=close)
    assert out[27:].isnan().all()


def test_the_op_reads_the_forward_context_and_refuses_to_run_or_nest_without_one():
    sequences = Sequences([3], ReferenceBackend, SPEC)
    sequences.plan([(0, 0, 3)])
    q, k, v = sequences.q[0], sequences.k[0], sequences.v[0]
    with pytest.raises(RuntimeError, match="outside forward_context"):
        attention(q, k, v, 0)
    context = ForwardContext(sequences.backend, [sequences.cache])
    with forward_context(context):
        torch.testing.assert_close(attention(q, k, v, 0), sequences.expected(0))
        with pytest.raises(RuntimeError, match="already running"), forward_context(context):
            pass


def test_selection_takes_the_first_that_serves_and_says_why_a_wanted_one_cannot():
    assert select_backend("auto", [SPEC], CPU) is TorchBackend
    assert select_backend("reference", [SPEC], CPU) is ReferenceBackend
    with pytest.raises(ConfigError, match="cpu: it computes in float32 only, not in float64"):
        select_backend("cpu", [SPEC], CPU)
    odd = dataclasses.replace(NATIVE, head_dim=12)
    with pytest.raises(ConfigError, match="a head_dim that is a multiple of 8, not 12"):
        select_backend("cpu", [odd], CPU)


@needs_kernel
def test_selection_prefers_the_native_kernel():
    assert select_backend("auto", [NATIVE], CPU) is CpuBackend
