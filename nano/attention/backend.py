"""AttentionBackend: what every attention kernel must do, and the metadata it reads.

T tokens in the step (ragged over R requests), H query heads, KVH key/value heads, D head dim.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from nano.config import KVSplit
from nano.errors import ConfigError
from nano.kv_spec import LayerKVSpec


class GraphSupport(IntEnum):
    """How much of a step a backend lets a CUDA graph hold."""

    NONE = 0
    PIECEWISE = 1  # everything between attention calls
    FULL_DECODE = 2  # whole steps of equal query lengths


PAD_SLOT = -1  # in slot_mapping: a padding token, whose KV is not written


@dataclass(slots=True)
class AttentionMetadata:
    """Who attends to what in one step. Requests are ordered by query length, short first."""

    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    num_decode_requests: int  # leading requests with a query of one token
    query_start_loc: np.ndarray  # [R + 1] int32 host: prefix sum of scheduled tokens
    seq_lens: np.ndarray  # [R] int32 host: KV length after this step, computed + scheduled
    block_table: Tensor  # [R, max_blocks] int32 device; columns past a request's blocks are stale
    slot_mapping: Tensor  # [T] int64 device: block_id * block_size + offset, or PAD_SLOT


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """What a backend is made for: a model all of whose layers are like `layer`."""

    block_size: int
    layer: LayerKVSpec
    num_heads: int  # query heads
    dtype: torch.dtype  # of q, k, v and out
    device: torch.device
    kv_split: Literal["auto"] | KVSplit = "auto"
    multiplied: torch.dtype | None = None  # what they may be rounded to; None: as they are


class AttentionBackend(ABC):
    """Paged attention over one layer's cache at a time. Made once per worker.

    `plan` is called once per step before any `forward` of that step.
    """

    name: ClassVar[str]
    graph_support: GraphSupport = GraphSupport.NONE

    def __init__(self, block_size: int, scale: float):
        self.block_size = block_size
        self.scale = scale  # multiplies q . k

    @classmethod
    def for_model(cls, setup: AttentionSetup) -> Self:
        """Raises `ConfigError` for a dtype or an option that it does not know."""
        if setup.kv_split != "auto":
            raise ConfigError(
                f"attention_kv_split={setup.kv_split} is for flashinfer; {cls.name}, which serves "
                "this model, divides KV in one way only; leave it out"
            )
        return cls(setup.block_size, setup.layer.head_dim**-0.5)

    @property
    def numerics_name(self) -> str:
        """Names the order of its sums: itself, and the options that decide about them."""
        return self.name

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        """Why this backend cannot serve such a layer there, as a sentence; None if it can."""

    @abstractmethod
    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor; the layout is the backend's own."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> None:
        """Host work for this step, shared by all layers."""

    def reserve_graph(  # noqa: B027  # most need nothing
        self, num_requests: int, query_len: int, max_blocks: int
    ) -> None:
        """Make what a full graph of `num_requests` x `query_len` tokens reads; twice is once.

        max_blocks: that one request may hold. Called before the capture, largest graphs first.
        """

    def forget_graphs(self) -> None:  # noqa: B027
        """Let go of what was reserved: the graphs that read it are gone."""

    def plan_graph(self, metadata: AttentionMetadata, num_requests: int) -> None:
        """Plan a uniform step for the capture or the replay of a full graph of `num_requests`.

        As `plan`, but `forward` must read what differs between steps from device memory that stays
        where it is. The metadata is that of the real requests, save two tensors that lie at fixed
        addresses and hold the padding too: `block_table` [num_requests, max_blocks], 0 in its
        rows, and `slot_mapping` [num_requests * max_query_len], PAD_SLOT in its slots. Here padding
        requests have no tokens but those of their query, and read whatever lies in block 0.
        """
        query_len = metadata.max_query_len
        seq_lens = np.full(num_requests, query_len, np.int32)
        seq_lens[: metadata.num_requests] = metadata.seq_lens
        self.plan(
            replace(
                metadata,
                num_requests=num_requests,
                num_tokens=num_requests * query_len,
                max_seq_len=metadata.block_table.shape[1] * self.block_size,  # of any step
                num_decode_requests=num_requests if query_len == 1 else 0,
                query_start_loc=np.arange(num_requests + 1, dtype=np.int32) * np.int32(query_len),
                seq_lens=seq_lens,
            )
        )

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        """Write k, v of the whole step into the cache, then attend. Causal, bottom-right aligned.

        q, out: [T, H, D]; k, v: [T, KVH, D]; kv_cache: `kv_cache_shape`. Only the first
        `num_tokens` rows of `out` are written. Every row of the step may read any KV written in
        it, which is what lets requests share a prefix in the very step that computes it.
        """
