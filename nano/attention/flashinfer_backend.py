"""Paged attention by FlashInfer on NVIDIA GPUs: its page tables, its plans, and what graphs replay.

T tokens in the step (ragged over R requests of Q tokens), H query heads, KVH key/value heads, D
head dim, P tokens in a page. A page is a block: block b is page b + 1, and page 0 is nobody's.

    step                         wrapper
    any mix of rows              one prefill wrapper, planned anew
    R x Q, for a full graph      a decode wrapper for each (R, Q), whose buffers never move

Page 0 is where padding writes, because FlashInfer's append kernel skips nothing: a row that belongs
to no request makes it read in front of its index. It is told of one request that owns the whole
cache, in which the position of a token is its slot + P; and PAD_SLOT + P is the end of page 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from nano.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSetup,
    GraphSupport,
)
from nano.config import KVSplit
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec

_VERSION = "0.7"  # knows q_len_per_req; the next one may have other names
_CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 units
_HEAD_DIMS = (64, 128, 256)  # what both its attention and its append kernels are built for
_CACHE_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
_FLOAT_WORKSPACE_BYTES = 128 * 2**20  # partial results of a split KV, as FlashInfer advises
# What the plan of a graph writes down: some 16 bytes for each tile of queries. FlashInfer would
# take 8 MiB of the device, and as much pinned memory, for every wrapper.
_GRAPH_PLAN_BYTES = 2**20
_FIXED_SPLIT_TOKENS = 1024
# Of its kernels the ones that know q_len_per_req, a fixed split, and a cache of fewer bits than q.
# "auto" means others on Hopper.
_KERNELS = "fa2"


class Event(Protocol):
    """What torch.cuda.Event is used for."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class CudaRuntime:
    """FlashInfer, and what of CUDA this backend needs beside it. Tests put a model in its place."""

    def __init__(self, device: torch.device):
        self.flashinfer: Any = import_module("flashinfer")
        self.capability = torch.cuda.get_device_capability(device)
        self.new_event: Callable[[], Event] = torch.cuda.Event

    def pinned(self, array: np.ndarray) -> Tensor:
        """A copy for the device to read. Torch reuses its memory only after copies from it."""
        return torch.from_numpy(array).pin_memory()


@dataclass(frozen=True, slots=True)
class _PageTable:
    """Which pages each request owns, this step's tokens included. All int32."""

    query_start: Tensor  # [R + 1] pinned: prefix sum of query lengths
    page_start: Tensor  # [R + 1] pinned: prefix sum of pages
    last_page_len: Tensor  # [R] pinned: tokens in a request's last page, 1..P
    pages: Tensor  # [page_start[-1]] device: of one request after the other


@dataclass(frozen=True, slots=True)
class _Graph:
    """A decode wrapper for (R, Q), and the memory that a captured graph reads. All int32."""

    wrapper: Any
    pages: Tensor  # [at least R * max_blocks]; graphs share it, for they run in turn
    tokens: Tensor  # [2, R * Q]: owner and position, as append takes them


class FlashInferBackend(AttentionBackend):
    """Cache layout: [1 + num_blocks, 2, P, KVH, D] (NHD), or with KVH before P (HND).

    NHD takes a token's heads as the projection leaves them; with 16 bits FlashInfer finds no
    difference. HND lets a head's page be read in one piece: for float8, whose rows of D bytes are
    short, and on Blackwell (10.x), whose own kernels read nothing else.

    A float8 cache has scales of 1: keys and values are rounded to 3 bits of mantissa (by 6 % at
    most), and what exceeds 448 becomes 448.

    kv_split: how the KV of one row is divided among thread blocks, whose results are then merged.

    - "scheduler" fills the device: fastest, and a row's last bits depend on the rest of the batch.
      It is the default: the matrix products around it depend on the batch as well, so another
      choice costs much and alone makes no promise.
    - "none": one thread block goes over a row's KV from end to end, whatever the batch, in graphs
      too; slow where few requests are long.
    - "fixed": parts of 1,024 tokens; independent of the batch and fast, but not for full graphs: a
      graph has a fixed number of thread blocks, and whether they merge is settled at capture.

    The latter two fix the division of KV. Outside graphs the tile of queries still follows the
    average query length of the batch, and with it the order within a part.
    """

    name = "flashinfer"
    graph_support = GraphSupport.FULL_DECODE

    def __init__(self, setup: AttentionSetup, runtime: CudaRuntime | None = None):
        """Raises `ConfigError` if no kernel computes in its dtype."""
        layer, dtype, device = setup.layer, setup.dtype, setup.device
        super().__init__(setup.block_size, layer.head_dim**-0.5)
        cache_dtype: torch.dtype = getattr(torch, layer.dtype)
        if dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(f"flashinfer computes in bfloat16 or float16, not in {dtype}")
        if cache_dtype.itemsize == dtype.itemsize and cache_dtype != dtype:
            raise ConfigError(f"flashinfer has no kernel for {dtype} over a {cache_dtype} cache")
        self.device = device
        self.runtime = runtime or CudaRuntime(device)
        is_heads_first = cache_dtype.itemsize == 1 or self.runtime.capability[0] == 10
        self.kv_layout = "HND" if is_heads_first else "NHD"
        self._cache_dtype = cache_dtype
        self._head_dim = layer.head_dim
        self._kv_split: KVSplit = "scheduler" if setup.kv_split == "auto" else setup.kv_split
        if self._kv_split == "fixed":
            self.graph_support = GraphSupport.PIECEWISE
        self._plan_options: dict[str, Any] = {
            "num_qo_heads": setup.num_heads,
            "num_kv_heads": layer.num_kv_heads,
            "page_size": self.block_size,
            "q_data_type": dtype,  # the default is float16
            "kv_data_type": cache_dtype,
            "o_data_type": dtype,
            "sm_scale": self.scale,
            "disable_split_kv": self._kv_split == "none",
        }
        if self._kv_split == "fixed":
            self._plan_options["fixed_split_size"] = max(1, _FIXED_SPLIT_TOKENS // self.block_size)
        self._workspace, self._graph_plans = _workspaces(device)
        self._prefill = self.runtime.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, self.kv_layout, backend=_KERNELS
        )
        self.wrapper = self._prefill  # serves the step that was planned last
        self._graphs: dict[tuple[int, int], _Graph] = {}  # by (R, Q)
        self._cache_tables: dict[int, tuple[Tensor, ...]] = {}  # by pages
        # FlashInfer's plans go through one pinned buffer, which a copy may still be reading.
        self._event = self.runtime.new_event()

    @classmethod
    def for_model(cls, setup: AttentionSetup) -> Self:
        return cls(setup)

    @property
    def numerics_name(self) -> str:
        return f"{self.name}, kv split {self._kv_split}"

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda only, not on {device.type}"
        capability = _capability(device)
        if capability is None:
            return "torch finds no CUDA device"
        if capability < _CAPABILITY:
            have, need = (".".join(map(str, x)) for x in (capability, _CAPABILITY))
            return f"it needs compute capability {need} or higher, and this GPU has {have}"
        installed = _installed_version()
        if installed is None:
            return f"flashinfer-python {_VERSION} is not installed (see nano-engine[cuda])"
        if not installed.startswith(f"{_VERSION}."):
            return f"it needs flashinfer-python {_VERSION}, and {installed} is installed"
        if spec.head_dim not in _HEAD_DIMS:
            return f"it needs a head_dim of {_spell(_HEAD_DIMS)}, not {spec.head_dim}"
        if spec.dtype not in _CACHE_DTYPES:
            return f"it caches {_spell(_CACHE_DTYPES)} only, not {spec.dtype}"
        return None

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        page = (self.block_size, spec.num_kv_heads)
        if self.kv_layout == "HND":
            page = (spec.num_kv_heads, self.block_size)
        return (1 + num_blocks, 2, *page, spec.head_dim)

    def plan(self, metadata: AttentionMetadata) -> None:
        table = self._page_table(metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
        self._event.synchronize()
        self._prefill.plan(
            table.query_start,
            table.page_start,
            table.pages,
            table.last_page_len,
            head_dim_qk=self._head_dim,
            causal=True,
            max_token_per_sequence=metadata.max_query_len,  # else Python looks for it
            **self._plan_options,
        )
        self._event.record()
        slots = metadata.slot_mapping[: metadata.num_tokens]
        tokens = torch.zeros(2, len(slots), dtype=torch.int32, device=slots.device)
        torch.add(slots, self.block_size, out=tokens[1])
        self.wrapper, self._tokens = self._prefill, tokens

    def reserve_graph(self, num_requests: int, query_len: int, max_blocks: int) -> None:
        assert self.graph_support == GraphSupport.FULL_DECODE, self.numerics_name
        key = num_requests, query_len
        if key in self._graphs:
            return
        empty = partial(torch.empty, dtype=torch.int32, device=self.device)
        num_pages = num_requests * max_blocks
        large = [g.pages for g in self._graphs.values() if len(g.pages) >= num_pages]
        pages = large[0] if large else empty(num_pages)
        wrapper = self.runtime.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            self.kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=empty(num_requests + 1),
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=empty(num_requests),
            backend=_KERNELS,
        )
        wrapper.reset_workspace_buffer(self._workspace, self._graph_plans)
        self._graphs[key] = _Graph(wrapper, pages, empty(2, num_requests * query_len).zero_())

    def forget_graphs(self) -> None:
        self._graphs.clear()

    def plan_graph(self, metadata: AttentionMetadata, num_requests: int) -> None:
        query_len = metadata.max_query_len
        assert metadata.num_tokens == metadata.num_requests * query_len, "query lengths differ"
        graph = self._graphs[num_requests, query_len]
        # Its decode wrapper wants of every request at least as many cached tokens as it has rows.
        seq_lens = np.full(num_requests, query_len, np.int32)
        seq_lens[: metadata.num_requests] = metadata.seq_lens
        query_start = np.arange(num_requests + 1, dtype=np.int32) * np.int32(query_len)
        table = self._page_table(query_start, seq_lens, metadata.block_table)
        self._event.synchronize()
        graph.wrapper.plan(  # and it copies the page table to where the graph finds it
            table.page_start,
            table.pages,
            table.last_page_len,
            head_dim=self._head_dim,
            q_len_per_req=query_len,
            **self._plan_options,
        )
        self._event.record()
        torch.add(metadata.slot_mapping, self.block_size, out=graph.tokens[1])
        self.wrapper, self._tokens = graph.wrapper, graph.tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        num_tokens = self._tokens.shape[1]
        k, v = (self._stored(x[:num_tokens]) for x in (k, v))
        whole_cache = self._whole_cache(len(kv_cache))
        self.runtime.flashinfer.append_paged_kv_cache(
            k, v, *self._tokens, kv_cache, *whole_cache, self.kv_layout
        )
        self.wrapper.run(q[:num_tokens], kv_cache, out=out[:num_tokens])

    def _page_table(
        self, query_start: np.ndarray, seq_lens: np.ndarray, block_table: Tensor
    ) -> _PageTable:
        """Never waits for the device, whose page ids the host does not know."""
        num_requests, device = len(seq_lens), block_table.device
        num_pages = -(-seq_lens // self.block_size)
        page_start = np.zeros(num_requests + 1, np.int32)
        num_pages.cumsum(out=page_start[1:])
        last_page_len = seq_lens - (num_pages - 1) * self.block_size
        host = self.runtime.pinned(np.concatenate([query_start, page_start, last_page_len]))
        sizes = [num_requests + 1, num_requests + 1, num_requests]
        host_query_start, host_page_start, host_last_page_len = host.split(sizes)
        starts = host_page_start.to(device, non_blocking=True)
        index = torch.arange(int(page_start[-1]), dtype=torch.int32, device=device)
        row = torch.bucketize(index, starts[1:], out_int32=True, right=True)
        pages = block_table[row, index - starts[row]] + 1
        return _PageTable(host_query_start, host_page_start, host_last_page_len, pages)

    def _whole_cache(self, num_pages: int) -> tuple[Tensor, ...]:
        """The page table of the request that owns all of the cache. Graphs read it."""
        if num_pages not in self._cache_tables:
            as_table = partial(torch.tensor, dtype=torch.int32, device=self.device)
            pages = torch.arange(num_pages, dtype=torch.int32, device=self.device)
            table = pages, as_table([0, num_pages]), as_table([self.block_size])
            self._cache_tables[num_pages] = table
        return self._cache_tables[num_pages]

    def _stored(self, x: Tensor) -> Tensor:
        """x as the cache holds it: append copies bytes and asks no dtype."""
        if self._cache_dtype == x.dtype:
            return x
        limit = torch.finfo(self._cache_dtype).max  # what a cast makes of more differs by device
        return x.clamp(-limit, limit).to(self._cache_dtype)


@cache
def _workspaces(device: torch.device) -> tuple[Tensor, Tensor]:
    """For partial results and for the plans of graphs: of all backends, whose steps run in turn."""
    return (
        torch.empty(_FLOAT_WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        torch.empty(_GRAPH_PLAN_BYTES, dtype=torch.uint8, device=device),
    )


def _capability(device: torch.device) -> tuple[int, int] | None:
    """None without a GPU."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def _installed_version() -> str | None:
    """Read from its metadata: importing it takes seconds."""
    try:
        return version("flashinfer-python")
    except PackageNotFoundError:
        return None


def _spell(choices: tuple[object, ...]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}"
