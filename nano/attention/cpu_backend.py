"""Paged attention on CPU by our own kernel: fixed order, so equal bits in any batch."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from nano.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSetup,
    GraphSupport,
)
from nano.kv_spec import LayerKVSpec
from nano.native.build import load_ops, multiplies_bfloat16

_LANES = 8
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class CpuBackend(AttentionBackend):
    """Computes in float32 over a float32 or bfloat16 cache, at any block size.

    In a model of dtype bfloat16 whose cache is of bfloat16 it rounds queries and weights as well,
    and multiplies pairs, where the CPU can (attention_pairs.h).

    Layout of the cache: [num_blocks, KVH, 2, block_size * D]; what is in a block is the kernel's
    own affair (see paged_attention.h). It reads whole panels of 16 positions where they lie if the
    block size is a multiple of 16, and copies them otherwise, which takes twice as long.
    """

    name = "cpu"
    graph_support = GraphSupport.FULL_DECODE  # a CPU has none, but one may be asked to record them

    def __init__(self, block_size: int, scale: float):
        super().__init__(block_size, scale)
        self._is_paired = False
        # Where a graph of (R, Q) finds its query_start and seq_lens.
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @classmethod
    def for_model(cls, setup: AttentionSetup) -> Self:
        backend = super().for_model(setup)
        backend._is_paired = (
            setup.multiplied == torch.bfloat16
            and setup.layer.dtype == "bfloat16"
            and multiplies_bfloat16()
        )
        return backend

    @property
    def numerics_name(self) -> str:
        return f"{self.name} paired" if self._is_paired else self.name

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it runs on cpu only, not on {device.type}"
        if spec.dtype not in _NAMES.values():
            return f"it caches float32 or bfloat16 only, not {spec.dtype}"
        if spec.head_dim % _LANES:
            return f"it needs a head_dim that is a multiple of {_LANES}, not {spec.head_dim}"
        if _op(spec.dtype) is None:
            return "it needs a C++ compiler"
        return None

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, spec.num_kv_heads, 2, self.block_size * spec.head_dim)

    def plan(self, metadata: AttentionMetadata) -> None:
        table, slots = metadata.block_table, metadata.slot_mapping
        query_start = torch.from_numpy(metadata.query_start_loc)
        seq_lens = torch.from_numpy(metadata.seq_lens)
        # The kernel reads raw memory: what is wrong here would be garbage there.
        for integers in (table, query_start, seq_lens):
            assert integers.dtype == torch.int32, integers.dtype
            assert integers.stride(-1) == 1, integers.stride()
        assert slots.dtype == torch.int64, slots.dtype
        assert slots.is_contiguous()
        self._step = (table, slots, query_start, seq_lens, self.block_size, self.scale)

    def forget_graphs(self) -> None:
        self._graphs.clear()

    def plan_graph(self, metadata: AttentionMetadata, num_requests: int) -> None:
        super().plan_graph(metadata, num_requests)
        table, slots, query_start, seq_lens, block_size, scale = self._step
        key = num_requests, metadata.max_query_len
        held = self._graphs.setdefault(key, (query_start, seq_lens))
        for mine, given in zip(held, (query_start, seq_lens)):
            mine.copy_(given)
        self._step = (table, slots, *held, block_size, scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        op = _op("paired" if self._is_paired else _NAMES[kv_cache.dtype])
        assert op is not None
        op(q, k, v, kv_cache, out, *self._step)


@cache
def _op(cache: str) -> Callable[..., None] | None:
    """The op for a cache of a dtype, or for a paired one; None without a compiler."""
    if not load_ops(Path(__file__).with_name(f"{cache}_attention.cpp")):
        return None
    op: Callable[..., None] = getattr(torch.ops.nano, f"paged_attention_{cache}").default
    return op
