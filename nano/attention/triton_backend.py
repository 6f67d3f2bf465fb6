"""Paged attention on GPUs by our own Triton kernels, for where FlashInfer is not.

T tokens in the step, R requests, H query heads, KVH key/value heads, D head dim.
"""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionMetadata, GraphSupport
from nano.kv_spec import LayerKVSpec

MAX_REQUESTS = 2**16  # of one step: 8 bytes each
MAX_HEAD_DIM = 256
RANGE = 512  # positions: what one program sums when a request is dealt out, a multiple of any tile
_CACHED = ("float32", "bfloat16", "float16", "float8_e4m3fn")
_OLDEST = {"float8_e4m3fn": (8, 9)}  # compute capability; before, a GPU cannot convert to it
_FULL_GRID = 256  # programs that keep a GPU busy: no more are wanted
_MAX_WORKSPACE = 2**27  # bytes that ranges computed apart may take


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of the kernel's tiles. It decides a row's bits, so only a layer decides it."""

    rows: int  # query tokens times heads of a group
    positions: int
    num_warps: int
    num_stages: int


def tile_of(dtype: torch.dtype, head_dim: int) -> Tile:
    """Tiles for queries of `dtype`. One shape for prompts and decode: what that costs is below."""
    if dtype == torch.float32:  # no tensor cores: every product is an instruction of its own
        return Tile(rows=16, positions=32, num_warps=4, num_stages=1)
    if head_dim > 128:
        return Tile(rows=64, positions=32, num_warps=8, num_stages=2)
    return Tile(rows=64, positions=64, num_warps=8, num_stages=2)


class TritonBackend(AttentionBackend):
    """One varlen kernel for chunks, decode and verification alike, with sums in a fixed order.

    It computes in what q comes in and adds up in float32. Cache: [num_blocks, 2, block_size, KVH,
    D]. As the order of sums must not depend on the batch, there is one tile shape per layer: 64
    rows of a group of query heads, of which a decoding request fills `H / KVH`. Tensor cores
    compute the rest in vain, in time that its reading of KV leaves over; prompts want tiles of 128
    and get 64. Long sequences of few requests are dealt out in ranges of 512 positions; the ranges
    are folded in order even when one program computes them all, which holds a second accumulator.

    A value that is not finite in the cache's dtype spoils exactly the rows that see it, all of
    their head dimensions; in an fp8 cache that is anything beyond 448, as scales are 1.

    CUDA graphs: a launch depends on the shapes of q, of the cache and of the block table, and on
    `num_requests`. First tokens and KV lengths are copied into a buffer that stays where it is;
    rows behind `num_requests` are empty there, so a graph may be replayed for fewer requests than
    it was captured with. `block_table` and `slot_mapping` are read where they lay at capture.
    """

    name = "triton"
    graph_support = GraphSupport.FULL_DECODE

    def __init__(self, block_size: int, scale: float):
        super().__init__(block_size, scale)
        self._rows: Tensor | None = None  # [MAX_REQUESTS + 1, 2] int32: first token, KV length
        self._most_requests = 0  # rows of the buffer that are not as they were made
        self._kernels = _load_kernels()

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda only, not on {device.type}"
        if find_spec("triton") is None:
            return "it needs the package triton, which is not installed"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        return layer_reason(spec) or capability_reason(spec, capability)

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, 2, self.block_size, spec.num_kv_heads, spec.head_dim)

    def plan(self, metadata: AttentionMetadata) -> None:
        num_requests = metadata.num_requests
        if num_requests > MAX_REQUESTS:
            raise ValueError(f"num_requests must be at most {MAX_REQUESTS}, got {num_requests}")
        assert metadata.block_table.dtype == torch.int32, metadata.block_table.dtype
        assert metadata.block_table.stride(-1) == 1, metadata.block_table.stride()
        assert metadata.slot_mapping.dtype == torch.int64, metadata.slot_mapping.dtype
        device = metadata.block_table.device
        if self._rows is None:
            self._rows = torch.zeros(MAX_REQUESTS + 1, 2, dtype=torch.int32, device=device)
        self._most_requests = max(self._most_requests, num_requests)
        rows = np.zeros((self._most_requests + 1, 2), np.int32)
        rows[:, 0] = metadata.num_tokens  # where a request behind the last begins, and ends
        rows[: num_requests + 1, 0] = metadata.query_start_loc
        rows[:num_requests, 1] = metadata.seq_lens
        staged = torch.from_numpy(rows)
        if device.type == "cuda":
            staged = staged.pin_memory()  # fresh: torch reuses it only after the copy
        self._rows[: len(rows)].copy_(staged, non_blocking=True)
        self._num_requests = num_requests
        self._table, self._slots = metadata.block_table, metadata.slot_mapping

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        assert q.stride(2) == k.stride(2) == v.stride(2) == out.stride(2) == 1
        assert kv_cache.is_contiguous()
        (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
        padded_dim = max(16, 1 << (head_dim - 1).bit_length())
        self._kernels.write_kv[(len(self._slots),)](
            k,
            v,
            self._slots,
            kv_cache,
            *k.stride()[:2],
            *v.stride()[:2],
            NUM_KV_HEADS=num_kv_heads,
            PADDED_HEADS=1 << (num_kv_heads - 1).bit_length(),
            HEAD_DIM=head_dim,
            D=padded_dim,
            BLOCK_SIZE=self.block_size,
            LARGEST=largest_value(kv_cache.dtype),
        )
        tile = tile_of(q.dtype, head_dim)
        group = num_heads // num_kv_heads
        block_m = max(tile.rows, 1 << (group - 1).bit_length())
        num_tiles = num_tokens // (block_m // group) + self._num_requests
        num_ranges = -(-self._table.shape[1] * self.block_size // RANGE)
        shape = (num_ranges, num_tokens, num_heads)
        is_split = (
            num_ranges > 1
            and num_tiles * num_kv_heads <= _FULL_GRID
            and math.prod(shape) * (head_dim + 2) * 4 <= _MAX_WORKSPACE
        )
        totals = sums = out  # not touched unless split
        if is_split:
            totals = q.new_empty(*shape, head_dim, dtype=torch.float32)
            sums = q.new_empty(*shape, 2, dtype=torch.float32)
        layer = {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "D": padded_dim,
            "BLOCK_M": block_m,
            "RANGE": RANGE,
            "num_warps": tile.num_warps,
        }
        self._kernels.attend[(num_tiles, num_kv_heads, num_ranges if is_split else 1)](
            q,
            kv_cache,
            out,
            self._table,
            self._rows,
            totals,
            sums,
            self.scale * math.log2(math.e),
            self._num_requests,
            num_tokens,
            int(is_split),
            *q.stride()[:2],
            *out.stride()[:2],
            self._table.stride(0),
            BLOCK_SIZE=self.block_size,
            BLOCK_N=tile.positions,
            num_stages=tile.num_stages,
            **layer,
        )
        if is_split:
            self._kernels.merge_ranges[(num_tiles, num_kv_heads)](
                out,
                self._rows,
                totals,
                sums,
                self._num_requests,
                num_tokens,
                *out.stride()[:2],
                **layer,
            )


def layer_reason(spec: LayerKVSpec) -> str | None:
    """Why the kernels cannot serve such a layer on any GPU."""
    if spec.dtype not in _CACHED:
        return f"it caches {', '.join(_CACHED)} only, not {spec.dtype}"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"it needs a head_dim of at most {MAX_HEAD_DIM}, not {spec.head_dim}"
    return None


def capability_reason(spec: LayerKVSpec, capability: tuple[int, int]) -> str | None:
    """Why they cannot on a GPU of this compute capability."""
    oldest = _OLDEST.get(spec.dtype, (8, 0))
    if capability >= oldest:
        return None
    wanted, given = (".".join(map(str, version)) for version in (oldest, capability))
    return f"a {spec.dtype} cache needs compute capability {wanted}, not {given}"


def largest_value(dtype: torch.dtype) -> float:
    """The largest float32 number that does not become infinite (or NaN) in `dtype`.

    Up to half a step beyond the largest of `dtype` numbers are rounded down to it.
    """
    if dtype == torch.float32:
        return torch.finfo(dtype).max
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    below = (largest.view(torch.int16 if dtype.itemsize == 2 else torch.uint8) - 1).view(dtype)
    halfway = float(largest) + (float(largest) - float(below)) / 2
    return float(np.nextafter(np.float32(halfway), np.float32(0.0)))


def _load_kernels() -> ModuleType:
    """The kernels' module, imported when a backend is made: triton is an optional package."""
    from nano.attention import triton_kernels

    return triton_kernels
