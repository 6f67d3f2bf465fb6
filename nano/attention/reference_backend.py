"""The oracle: attention written as the textbook does, one query at a time, on any device."""

import torch
from torch import Tensor

from nano.attention.backend import PAD_SLOT, AttentionBackend, AttentionMetadata
from nano.kv_spec import LayerKVSpec


class ReferenceBackend(AttentionBackend):
    """Slow and obviously right. Every other backend is tested against it."""

    name = "reference"

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        return None

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks * self.block_size, spec.num_kv_heads, spec.head_dim)

    def plan(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        meta = self.metadata
        keys, values = kv_cache
        for token in range(meta.num_tokens):
            slot = int(meta.slot_mapping[token])
            if slot != PAD_SLOT:
                keys[slot], values[slot] = k[token], v[token]
        group = q.shape[1] // k.shape[1]  # query heads per KV head
        for request in range(meta.num_requests):
            start, end = meta.query_start_loc[request : request + 2]
            seq_len = int(meta.seq_lens[request])
            blocks = meta.block_table[request].tolist()
            slots = [
                blocks[position // self.block_size] * self.block_size + position % self.block_size
                for position in range(seq_len)
            ]
            for token in range(start, end):
                num_visible = seq_len - (end - 1 - token)  # causal: itself and all before
                visible = slots[:num_visible]
                for head in range(q.shape[1]):
                    scores = keys[visible, head // group] @ q[token, head] * self.scale
                    out[token, head] = torch.softmax(scores, 0) @ values[visible, head // group]
