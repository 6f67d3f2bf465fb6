"""AttentionBackend: what every attention kernel must do, and the metadata it reads.

T tokens in the step (ragged over R requests), H query heads, KVH key/value heads, D head dim.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

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


class AttentionBackend(ABC):
    """Paged attention over one layer's cache at a time. Made once per worker.

    `plan` is called once per step before any `forward` of that step.
    """

    name: ClassVar[str]
    graph_support: ClassVar[GraphSupport] = GraphSupport.NONE

    def __init__(self, block_size: int, scale: float):
        self.block_size = block_size
        self.scale = scale  # multiplies q . k

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

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        """Write k, v of the whole step into the cache, then attend. Causal, bottom-right aligned.

        q, out: [T, H, D]; k, v: [T, KVH, D]; kv_cache: `kv_cache_shape`. Only the first
        `num_tokens` rows of `out` are written. Every row of the step may read any KV written in
        it, which is what lets requests share a prefix in the very step that computes it.
        """
