"""RaggedStep: requests with random queries, keys and values, scattered over a paged cache.

H query heads, KVH key/value heads, D head dim.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nano.attention.backend import (
    PAD_SLOT,
    AttentionBackend,
    AttentionMetadata,
    AttentionSetup,
)
from nano.kv_spec import LayerKVSpec

Ranges = list[tuple[int, int, int]]  # (request, first position, end) of what a step computes

_UNUSED_BLOCKS = 3
_ANYTHING = 2**30  # in columns of the block table that nobody may read


class RaggedStep:
    """The same numbers for every backend. Whatever was never written is NaN."""

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        spec: LayerKVSpec,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = 16,
    ):
        """requests: (tokens in the cache, tokens to compute) of each; short steps come first."""
        self.spec, self.num_heads, self.dtype = spec, num_heads, dtype
        self.device, self.block_size = device, block_size
        requests = sorted(requests, key=lambda request: request[1])
        lengths = [computed + scheduled for computed, scheduled in requests]
        self.step: Ranges = [(i, c, c + s) for i, (c, s) in enumerate(requests)]
        before = [(i, 0, c) for i, (c, _) in enumerate(requests) if c]
        self.context: Ranges = sorted(before, key=lambda entry: entry[2])
        generator = torch.Generator().manual_seed(1)
        counts = [-(-length // block_size) for length in lengths]
        self.num_blocks = sum(counts) + _UNUSED_BLOCKS
        order = torch.randperm(self.num_blocks, generator=generator).tolist()
        self._blocks = [[order.pop() for _ in range(count)] for count in counts]

        def random(heads: int) -> list[Tensor]:
            size = heads, spec.head_dim
            return [torch.randn(n, *size, generator=generator).to(dtype) for n in lengths]

        self._q, self._k, self._v = (
            random(n) for n in (num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )

    @property
    def setup(self) -> AttentionSetup:
        """For a backend under test."""
        return AttentionSetup(self.block_size, self.spec, self.num_heads, self.dtype, self.device)

    @property
    def reference_setup(self) -> AttentionSetup:
        """For what says what is right: in float32, on the CPU."""
        cpu = torch.device("cpu")
        return AttentionSetup(self.block_size, self.spec, self.num_heads, torch.float32, cpu)

    def new_cache(self, backend: AttentionBackend) -> Tensor:
        shape = backend.kv_cache_shape(self.spec, self.num_blocks)
        return torch.full(shape, torch.nan, device=self.device).to(getattr(torch, self.spec.dtype))

    def metadata(
        self, ranges: Ranges, num_padding: int = 0, num_rows: int = 0, num_columns: int = 0
    ) -> AttentionMetadata:
        """Of a step that computes `ranges`. At least so many rows and columns of the block table,
        block 0 in rows of nobody."""
        counts = [end - start for _, start, end in ranges]
        slots = [slot for part in ranges for slot in self.slots(*part)]
        width = max(num_columns, *(-(-end // self.block_size) for _, _, end in ranges))
        table = np.zeros((max(num_rows, len(ranges)), width), np.int32)
        for row, (request, _, end) in enumerate(ranges):
            blocks = self._blocks[request][: -(-end // self.block_size)]
            table[row] = [*blocks, *[_ANYTHING if not num_rows else 0] * (width - len(blocks))]
        return AttentionMetadata(
            num_requests=len(ranges),
            num_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(end for _, _, end in ranges),
            num_decode_requests=counts.count(1),
            query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
            seq_lens=np.array([end for _, _, end in ranges], np.int32),
            block_table=torch.from_numpy(table).to(self.device),
            slot_mapping=torch.tensor(slots + [PAD_SLOT] * num_padding, device=self.device),
        )

    def slots(self, request: int, start: int, end: int) -> list[int]:
        size, blocks = self.block_size, self._blocks[request]
        return [blocks[p // size] * size + p % size for p in range(start, end)]

    def forward(
        self, backend: AttentionBackend, cache: Tensor, ranges: Ranges, num_padding: int = 0
    ) -> Tensor:
        """What a planned backend makes of `ranges`: [T + padding, H, D], 77 where it wrote none."""
        q, k, v = (
            self._rows(x, ranges, num_padding).to(self.device) for x in (self._q, self._k, self._v)
        )
        out = torch.full_like(q, 77.0)
        backend.forward(q, k, v, cache, out)
        return out

    def run(
        self, backend: AttentionBackend, cache: Tensor, ranges: Ranges, num_padding: int = 0
    ) -> Tensor:
        """Plan and compute."""
        backend.plan(self.metadata(ranges, num_padding))
        return self.forward(backend, cache, ranges, num_padding)

    def expected(self, reference: AttentionBackend, ranges: Ranges) -> Tensor:
        """[T, H, D] float32 by the reference on the CPU, over keys and values as the cache rounds
        them: what is left between it and a backend is the backend's own arithmetic.

        The keys and values in front of `ranges` are put into the reference's cache as they are.
        """
        stored = getattr(torch, self.spec.dtype)
        keys, values = ([part.to(stored).float() for part in x] for x in (self._k, self._v))
        cache = torch.full(reference.kv_cache_shape(self.spec, self.num_blocks), torch.nan)
        for request, start, _ in ranges:
            slots = self.slots(request, 0, start)
            cache[0, slots], cache[1, slots] = keys[request][:start], values[request][:start]
        metadata = self.metadata(ranges)
        metadata.block_table = metadata.block_table.cpu()
        metadata.slot_mapping = metadata.slot_mapping.cpu()
        reference.plan(metadata)
        q, k, v = (self._rows(x, ranges, 0).float() for x in (self._q, keys, values))
        out = torch.empty_like(q)
        reference.forward(q, k, v, cache, out)
        return out

    def _rows(self, x: list[Tensor], ranges: Ranges, num_padding: int) -> Tensor:
        parts = [x[request][start:end] for request, start, end in ranges]
        return torch.cat([*parts, x[0][:1].expand(num_padding, -1, -1)])
