"""Paged attention on CPU by our own kernel: fixed order, so equal bits in any batch."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionMetadata
from nano.kv_spec import LayerKVSpec
from nano.native.build import load_ops

SOURCE = Path(__file__).with_name("cpu_attention.cpp")
_LANES = 8


class CpuBackend(AttentionBackend):
    """Computes in float32 over a float32 or bfloat16 cache, at any block size.

    Layout of the cache: [num_blocks, KVH, 2, block_size * D]; what is in a block is the kernel's
    own affair (see cpu_attention.cpp). It reads whole panels of 16 positions where they lie if the
    block size is a multiple of 16, and copies them otherwise, which takes twice as long.
    """

    name = "cpu"

    def __init__(self, block_size: int, scale: float):
        super().__init__(block_size, scale)
        self._op = _op()

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it runs on cpu only, not on {device.type}"
        if spec.dtype not in ("float32", "bfloat16"):
            return f"it caches float32 or bfloat16 only, not {spec.dtype}"
        if spec.head_dim % _LANES:
            return f"it needs a head_dim that is a multiple of {_LANES}, not {spec.head_dim}"
        if _op() is None:
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        assert self._op is not None
        self._op(q, k, v, kv_cache, out, *self._step)


@cache
def _op() -> Callable[..., None] | None:
    """The op of cpu_attention.cpp; None without a compiler."""
    if not load_ops(SOURCE):
        return None
    op: Callable[..., None] = torch.ops.nano.paged_attention.default
    return op
