"""Paged attention on CPU by our own kernel: fixed order, so equal bits in any batch."""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionMetadata
from nano.kv_spec import LayerKVSpec
from nano.native.build import load_library

_SOURCE = Path(__file__).with_name("cpu_attention.cpp")
_LANES = 8


class CpuBackend(AttentionBackend):
    """float32, any block size, any head_dim that is a multiple of 8 (see cpu_attention.cpp).

    Cache layout: [num_blocks, 2, KVH, block_size, D], so a head reads whole blocks in a row.
    """

    name = "cpu"

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it runs on cpu only, not on {device.type}"
        if spec.dtype != "float32":
            return f"it computes in float32 only, not in {spec.dtype}"
        if spec.head_dim % _LANES:
            return f"it needs a head_dim that is a multiple of {_LANES}, not {spec.head_dim}"
        if _kernels() is None:
            return "it needs a C++ compiler"
        return None

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, 2, spec.num_kv_heads, self.block_size, spec.head_dim)

    def plan(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata
        self._table = metadata.block_table.contiguous()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        library, meta = _kernels(), self.metadata
        assert library is not None
        assert out.is_contiguous()
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        num_kv_heads, head_dim = k.shape[1:]
        library.nano_write_kv(
            k.data_ptr(),
            v.data_ptr(),
            kv_cache.data_ptr(),
            meta.slot_mapping.data_ptr(),
            meta.num_tokens,
            num_kv_heads,
            self.block_size,
            head_dim,
        )
        library.nano_attention(
            q.data_ptr(),
            out.data_ptr(),
            kv_cache.data_ptr(),
            self._table.data_ptr(),
            meta.query_start_loc.ctypes.data,
            meta.seq_lens.ctypes.data,
            meta.num_requests,
            self._table.shape[1],
            q.shape[1],
            num_kv_heads,
            self.block_size,
            head_dim,
            self.scale,
        )


@cache
def _kernels() -> ctypes.CDLL | None:
    library = load_library(_SOURCE)
    if library is not None:
        # Always declared: undeclared arguments are passed as 32-bit integers.
        pointer, integer = ctypes.c_void_p, ctypes.c_long
        library.nano_write_kv.argtypes = [pointer] * 4 + [integer] * 4
        library.nano_attention.argtypes = [pointer] * 6 + [integer] * 6 + [ctypes.c_float]
        library.nano_write_kv.restype = library.nano_attention.restype = None
    return library
