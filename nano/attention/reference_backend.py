"""The oracle: attention written as the textbook does, one query at a time, on any device.

H query heads, KVH key/value heads, D head dim, S tokens that a query sees.
"""

import torch
from torch import Tensor

from nano.attention.backend import PAD_SLOT, AttentionBackend, AttentionMetadata
from nano.kv_spec import LayerKVSpec


class ReferenceBackend(AttentionBackend):
    """Slow and obviously right. Every other backend is tested against it.

    It computes in what q comes in, whatever the cache stores.
    """

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
            positions = torch.arange(seq_len, device=q.device)
            blocks = meta.block_table[request, positions // self.block_size]
            slots = blocks * self.block_size + positions % self.block_size
            for token in range(start, end):
                num_visible = seq_len - (end - 1 - token)  # causal: itself and all before
                visible = slots[:num_visible]
                seen_keys, seen_values = (  # [S, H, D]
                    cached[visible].to(q.dtype).repeat_interleave(group, dim=1)
                    for cached in (keys, values)
                )
                scores = torch.einsum("hd,shd->hs", q[token], seen_keys) * self.scale
                out[token] = torch.einsum("hs,shd->hd", scores.softmax(-1), seen_values)
