"""GraphedAttention: the attention backend of a forward pass that may be a graph.

To whoever plans a step and to the model it is the backend they know. It settles which graph the
step is to be, and pads what the backend plans with to the size of that graph.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nano.attention.backend import PAD_SLOT, AttentionBackend, AttentionMetadata
from nano.compile.graph_keys import (
    MAX_GRAPH_TOKENS,
    Dispatch,
    GraphKey,
    GraphKeys,
    StepShape,
)
from nano.kv_spec import LayerKVSpec

# q, k, v, kv_cache, out: as in `AttentionBackend.forward`.
AttentionCall = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class GraphedAttention(AttentionBackend):
    """Wraps the backend of one context. Owns the inputs that graphs read, at fixed addresses."""

    def __init__(
        self,
        inner: AttentionBackend,
        keys: GraphKeys,
        captured: Container[GraphKey],
        *,
        device: torch.device,
        max_model_len: int,
    ):
        """`captured` grows while steps are captured. `max_model_len`: of the longest request."""
        super().__init__(inner.block_size, inner.scale)
        self.inner = inner
        self.keys = keys
        self._captured = captured
        self.step = Dispatch(None)  # as planned last
        self.shapes: Counter[StepShape] = Counter()  # planned so far, of those small enough
        self._cut: Callable[[AttentionCall], None] | None = None
        size, max_blocks = keys.max_num_tokens, -(-max_model_len // inner.block_size)
        self._input_ids = torch.zeros(size, dtype=torch.int32, device=device)
        self._positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._slots = torch.full((size,), PAD_SLOT, dtype=torch.int64, device=device)
        self._block_table = torch.zeros(
            keys.max_num_requests, max_blocks, dtype=torch.int32, device=device
        )

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        return "it wraps another backend"

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        return self.inner.kv_cache_shape(spec, num_blocks)

    def plan(self, metadata: AttentionMetadata) -> None:
        shape = StepShape.of(metadata)
        if shape.num_tokens <= MAX_GRAPH_TOKENS:
            self.shapes[shape] += 1
        step = self.keys.dispatch(shape)
        if step.key is not None and step.key not in self._captured:
            step = Dispatch(None, why_eager=f"not captured: {step.key}")
        self.step = step
        if step.key is None:
            self.inner.plan(metadata)
        else:
            self._plan_padded(metadata, step.key)

    def plan_padding(self, key: GraphKey) -> None:
        """Plan a full step of `key` that consists of padding, to capture it."""
        assert key.num_requests is not None
        self.inner.reserve_graph(key.num_requests, key.query_len, self._block_table.shape[1])
        self._plan_padded(
            AttentionMetadata(
                num_requests=0,
                num_tokens=0,
                max_query_len=key.query_len,
                max_seq_len=0,
                num_decode_requests=0,
                query_start_loc=np.zeros(1, np.int32),
                seq_lens=np.zeros(0, np.int32),
                block_table=self._block_table[:0, :0],
                slot_mapping=self._slots[:0],
            ),
            key,
        )

    def forget_graphs(self) -> None:
        self.inner.forget_graphs()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        if self._cut is None:
            self.inner.forward(q, k, v, kv_cache, out)
        else:
            self._cut((q, k, v, kv_cache, out))

    @contextmanager
    def cutting(self, cut: Callable[[AttentionCall], None]) -> Iterator[None]:
        """Hand attention calls to `cut` instead of computing them."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None

    def tokens(self, key: GraphKey) -> tuple[Tensor, Tensor]:
        """What graphs of `key` read: token ids [T] int32, positions [T] int64."""
        return self._input_ids[: key.num_tokens], self._positions[: key.num_tokens]

    def load_tokens(self, key: GraphKey, input_ids: Tensor, positions: Tensor) -> None:
        """Write the step's tokens where graphs of `key` read; padding is token 0 at position 0."""
        for held, given in zip(self.tokens(key), (input_ids, positions)):
            _padded(held, given, 0)

    def _plan_padded(self, metadata: AttentionMetadata, key: GraphKey) -> None:
        """As a step of the size of `key`."""
        num_requests = metadata.num_requests
        slots = _padded(self._slots[: key.num_tokens], metadata.slot_mapping, PAD_SLOT)
        if key.num_requests is None:
            self.inner.plan(replace(metadata, slot_mapping=slots))
            return
        block_table = self._block_table[: key.num_requests]
        block_table[:num_requests, : metadata.block_table.shape[1]].copy_(metadata.block_table)
        block_table[num_requests:].zero_()
        self.inner.plan_graph(
            replace(metadata, block_table=block_table, slot_mapping=slots), key.num_requests
        )


def _padded(held: Tensor, given: Tensor, padding: int) -> Tensor:
    """`held`, with `given` written to its beginning."""
    held[: len(given)].copy_(given)
    held[len(given) :].fill_(padding)
    return held
