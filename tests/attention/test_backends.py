"""Every backend against the oracle, and the oracle against plain softmax, on ragged batches."""

import numpy as np
import pytest
import torch

from nano.attention.backend import AttentionBackend, AttentionMetadata
from nano.attention.cpu_backend import CpuBackend
from nano.attention.op import ForwardContext, attention, forward_context
from nano.attention.reference_backend import ReferenceBackend
from nano.attention.select import select_backend
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec

# (computed, scheduled): decode, verification, first chunk, later chunk, whole prompt, one token
RAGGED = [(7, 1), (40, 1), (12, 4), (0, 9), (16, 16), (0, 33), (0, 1)]
SPEC = LayerKVSpec("layer", num_kv_heads=2, head_dim=8, dtype="float64")
NUM_HEADS = 6


class Case:
    """A ragged batch with its full keys and values, scattered over shuffled blocks."""

    def __init__(self, block_size: int, shape: list[tuple[int, int]], num_padding: int = 0):
        shape = sorted(shape, key=lambda request: request[1])
        self.block_size = block_size
        self.shape = shape
        generator = torch.Generator().manual_seed(block_size)
        seq_lens = np.array([computed + scheduled for computed, scheduled in shape], np.int32)
        counts = [-(-int(n) // block_size) for n in seq_lens]
        self.num_blocks = sum(counts) + 3
        shuffled = torch.randperm(self.num_blocks, generator=generator).tolist()
        table = torch.zeros(len(shape), max(counts), dtype=torch.int32)
        slots = []
        self.slots_of = []
        for i, count in enumerate(counts):
            blocks = [shuffled.pop() for _ in range(count)]
            table[i, :count] = torch.tensor(blocks)
            all_slots = [
                blocks[p // block_size] * block_size + p % block_size for p in range(seq_lens[i])
            ]
            self.slots_of.append(all_slots)
            slots += all_slots[shape[i][0] :]
        self.unused_blocks = shuffled
        starts = np.cumsum([0] + [scheduled for _, scheduled in shape]).astype(np.int32)
        num_tokens = int(starts[-1])

        def random(heads: int) -> list[torch.Tensor]:
            return [
                torch.randn(int(n), heads, SPEC.head_dim, generator=generator, dtype=torch.float64)
                for n in seq_lens
            ]

        self.keys, self.values = random(SPEC.num_kv_heads), random(SPEC.num_kv_heads)
        self.queries = [q[computed:] for q, (computed, _) in zip(random(NUM_HEADS), shape)]
        self.padding = num_padding
        self.metadata = AttentionMetadata(
            num_requests=len(shape),
            num_tokens=num_tokens,
            max_query_len=max(scheduled for _, scheduled in shape),
            max_seq_len=int(seq_lens.max()),
            num_decode_requests=sum(scheduled == 1 for _, scheduled in shape),
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_table=table,
            slot_mapping=torch.tensor(slots + [-1] * num_padding),
        )

    def expected(self) -> torch.Tensor:
        """Textbook causal attention, request by request, with no cache at all."""
        out = []
        for q, k, v, (computed, scheduled) in zip(self.queries, self.keys, self.values, self.shape):
            k, v = (x.repeat_interleave(NUM_HEADS // SPEC.num_kv_heads, dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * SPEC.head_dim**-0.5
            visible = (
                torch.arange(computed + scheduled) <= torch.arange(scheduled)[:, None] + computed
            )
            scores = scores.masked_fill(~visible, float("-inf"))
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(out)

    def run(self, backend_class: type[AttentionBackend]) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, cache) of one step: earlier tokens are cached by a step of their own."""
        backend = backend_class(self.block_size, SPEC.head_dim**-0.5)
        cache = torch.full(
            backend.kv_cache_shape(SPEC, self.num_blocks), float("nan"), dtype=torch.float64
        )
        keys, values = (c.reshape(-1, SPEC.num_kv_heads, SPEC.head_dim) for c in cache)
        for k, v, slots, (computed, _) in zip(self.keys, self.values, self.slots_of, self.shape):
            keys[slots[:computed]], values[slots[:computed]] = k[:computed], v[:computed]
        pad = torch.zeros(self.padding, SPEC.num_kv_heads, SPEC.head_dim, dtype=torch.float64)
        k = torch.cat([k[c:] for k, (c, _) in zip(self.keys, self.shape)] + [pad])
        v = torch.cat([v[c:] for v, (c, _) in zip(self.values, self.shape)] + [pad])
        q = torch.cat([*self.queries, torch.zeros(self.padding, NUM_HEADS, SPEC.head_dim)])
        out = torch.full_like(q, 77.0)
        backend.plan(self.metadata)
        backend.forward(q, k, v, cache, out)
        return out, cache


@pytest.mark.parametrize("backend", [ReferenceBackend, CpuBackend])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_ragged_batches_equal_textbook_attention(backend, block_size):
    case = Case(block_size, RAGGED)
    out, _ = case.run(backend)
    torch.testing.assert_close(out, case.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", [ReferenceBackend, CpuBackend])
def test_padding_rows_and_foreign_blocks_are_untouched(backend):
    case = Case(4, RAGGED, num_padding=5)
    out, cache = case.run(backend)
    assert (out[case.metadata.num_tokens :] == 77.0).all()
    slots = cache.reshape(2, case.num_blocks, -1)
    assert slots[:, case.unused_blocks].isnan().all()


def test_a_request_reads_kv_that_another_writes_in_the_same_step():
    # Two requests share their first block; only the first one computes it.
    case = Case(4, [(0, 8), (4, 2)])
    short, long = 0, 1  # ordered by query length
    shared = case.metadata.block_table[long, 0].item()
    case.metadata.block_table[short, 0] = shared
    case.keys[short][:4], case.values[short][:4] = case.keys[long][:4], case.values[long][:4]
    case.slots_of[short][:4] = case.slots_of[long][:4]
    for backend in (ReferenceBackend, CpuBackend):
        torch.testing.assert_close(case.run(backend)[0], case.expected())


def test_the_op_reads_the_forward_context_and_refuses_to_run_or_nest_without_one():
    case = Case(16, [(0, 3)])
    backend = ReferenceBackend(16, SPEC.head_dim**-0.5)
    backend.plan(case.metadata)
    cache = torch.empty(backend.kv_cache_shape(SPEC, case.num_blocks), dtype=torch.float64)
    q, k, v = case.queries[0], case.keys[0], case.values[0]
    with pytest.raises(RuntimeError, match="outside forward_context"):
        attention(q, k, v, 0)
    context = ForwardContext(backend, [cache])
    with forward_context(context):
        torch.testing.assert_close(attention(q, k, v, 0), case.expected())
        with pytest.raises(RuntimeError, match="already running"), forward_context(context):
            pass


def test_selection_says_why_a_wanted_backend_cannot_serve():
    cpu = torch.device("cpu")
    assert select_backend("auto", [SPEC], cpu) is CpuBackend
    assert select_backend("reference", [SPEC], cpu) is ReferenceBackend
    with pytest.raises(ConfigError, match="cpu: it runs on cpu only, not on meta"):
        select_backend("cpu", [SPEC], torch.device("meta"))
