"""Sequences: requests with random queries, keys and values, and their places in a paged cache."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionMetadata
from nano.kv_spec import LayerKVSpec

Ranges = list[tuple[int, int, int]]  # (request, first token, end) of what a step computes

SPEC = LayerKVSpec("layer", num_kv_heads=2, head_dim=8, dtype="float64")
NUM_HEADS = 6
# (computed, scheduled): decode, verification, first chunk, later chunk, whole prompt, one token;
# the last two cross positions 256 and 512, where the CPU kernel begins a new range.
RAGGED = [(7, 1), (40, 1), (12, 4), (0, 9), (16, 16), (0, 33), (0, 1), (254, 5), (530, 1)]


class Sequences:
    """The cache is full of NaN at first: whatever reads what was never written shows it."""

    def __init__(
        self,
        lengths: list[int],
        backend_class: type[AttentionBackend],
        spec: LayerKVSpec = SPEC,
        block_size: int = 16,
        num_heads: int = NUM_HEADS,
    ):
        self.spec, self.num_heads, self.block_size = spec, num_heads, block_size
        # What is computed in: a bfloat16 cache is read by a float32 model.
        self.dtype = torch.float32 if spec.dtype == "bfloat16" else getattr(torch, spec.dtype)
        self.backend = backend_class(block_size, spec.head_dim**-0.5)
        counts = [-(-length // block_size) for length in lengths]
        self.num_blocks = sum(counts) + 3
        order = torch.Generator().manual_seed(5)
        shuffled = torch.randperm(self.num_blocks, generator=order).tolist()
        self.blocks = [[shuffled.pop() for _ in range(count)] for count in counts]
        shape = self.backend.kv_cache_shape(spec, self.num_blocks)
        self.cache = torch.full(shape, float("nan"), dtype=getattr(torch, spec.dtype))

        generator = torch.Generator().manual_seed(6)  # contents do not depend on the layout

        def random(heads: int) -> list[Tensor]:
            kind = {"generator": generator, "dtype": torch.float64}
            return [torch.randn(n, heads, spec.head_dim, **kind) for n in lengths]

        self.q, self.k, self.v = (random(h) for h in (num_heads, *[spec.num_kv_heads] * 2))

    def plan(self, ranges: Ranges, num_padding: int = 0) -> None:
        """Plan a step; short queries must come first."""
        slots = [
            self.blocks[request][p // self.block_size] * self.block_size + p % self.block_size
            for request, start, end in ranges
            for p in range(start, end)
        ]
        counts = [end - start for _, start, end in ranges]
        assert counts == sorted(counts)
        widest = max(-(-end // self.block_size) for _, _, end in ranges)
        table = torch.full((len(ranges), widest), 2**30, dtype=torch.int32)  # read by nobody
        for row, (request, _, end) in enumerate(ranges):
            blocks = self.blocks[request][: -(-end // self.block_size)]
            table[row, : len(blocks)] = torch.tensor(blocks)
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

    def gather(self, x: list[Tensor], ranges: Ranges, num_padding: int = 0) -> Tensor:
        parts = [x[request][start:end] for request, start, end in ranges]
        return torch.cat([*parts, x[0][:1].expand(num_padding, -1, -1)]).to(self.dtype)

    def step(self, ranges: Ranges, num_padding: int = 0) -> Tensor:
        """The output rows of one step, padding rows last."""
        self.plan(ranges, num_padding)
        q, k, v = (self.gather(x, ranges, num_padding) for x in (self.q, self.k, self.v))
        out = torch.full_like(q, 77.0)
        self.backend.forward(q, k, v, self.cache, out)
        return out

    def expected(self, request: int) -> Tensor:
        """Textbook causal attention of a whole request in float64, with no cache at all."""
        group = self.num_heads // self.spec.num_kv_heads
        k, v = (
            x[request].to(self.cache.dtype).double().repeat_interleave(group, dim=1)
            for x in (self.k, self.v)
        )
        scores = torch.einsum("qhd,khd->hqk", self.q[request], k) * self.spec.head_dim**-0.5
        future = torch.ones(len(k), len(k), dtype=torch.bool).triu(1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


def ragged(
    backend_class: type[AttentionBackend],
    spec: LayerKVSpec,
    block_size: int = 16,
    num_heads: int = NUM_HEADS,
) -> tuple[Sequences, Ranges]:
    """The sequences of RAGGED with what is computed already in the cache, and their next step."""
    shape = sorted(RAGGED, key=lambda request: request[1])
    lengths = [computed + scheduled for computed, scheduled in shape]
    sequences = Sequences(lengths, backend_class, spec, block_size, num_heads)
    earlier = [(i, 0, computed) for i, (computed, _) in enumerate(shape) if computed]
    sequences.step(sorted(earlier, key=lambda entry: entry[2]))
    return sequences, [(i, c, c + s) for i, (c, s) in enumerate(shape)]


def ragged_outputs(
    backend_class: type[AttentionBackend],
) -> dict[tuple[str, int, int], Tensor]:
    """Outputs of ragged steps in many shapes, to be compared with those of another process."""
    outputs = {}
    for dtype in ("float32", "bfloat16"):
        for head_dim in (8, 24, 64, 80):
            spec = dataclasses.replace(SPEC, head_dim=head_dim, dtype=dtype)
            for num_heads in (2, 6, 14):
                sequences, ranges = ragged(backend_class, spec, 16, num_heads)
                outputs[dtype, head_dim, num_heads] = sequences.step(ranges)
    return outputs
