"""Paged attention with torch's own kernels: gather each request's KV, attend, done.

T tokens, Q of them of one request, H query heads, KVH key/value heads, D head dim, S tokens of one
request.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nano.attention.backend import AttentionBackend, AttentionMetadata
from nano.kv_spec import LayerKVSpec

_NOT_CACHED = "float8_e4m3fn"  # torch has no index_copy_ for it


class TorchBackend(AttentionBackend):
    """One SDPA call per request over its gathered blocks. Last bits depend on batch and chunk.

    Cache layout: [2, num_blocks, block_size, KVH, D], so a request's gather copies whole blocks.
    It computes in what q comes in, whatever the cache stores.
    """

    name = "torch"

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        if spec.dtype == _NOT_CACHED:
            return f"it caches no {spec.dtype}, which torch cannot write slot by slot"
        return None

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)

    def plan(self, metadata: AttentionMetadata) -> None:
        self._slots = metadata.slot_mapping[: metadata.num_tokens]  # padding comes last
        # A query over part of its sequence needs a mask; it is the same in every layer.
        self._requests: list[tuple[int, int, int, Tensor, Tensor | None]] = []
        for request in range(metadata.num_requests):
            start, end = metadata.query_start_loc[request : request + 2].tolist()
            seq_len = int(metadata.seq_lens[request])
            num_blocks = -(-seq_len // self.block_size)
            blocks = metadata.block_table[request, :num_blocks]
            mask = None
            if end - start > 1:
                mask = torch.ones(end - start, seq_len, dtype=torch.bool, device=blocks.device)
                mask = mask.tril_(diagonal=seq_len - (end - start))  # bottom-right causal
            self._requests.append((start, end, seq_len, blocks, mask))

    def write(self, k: Tensor, v: Tensor, kv_cache: Tensor) -> None:
        """Store the step's keys and values."""
        num_tokens = len(self._slots)
        k, v = (x[:num_tokens].to(kv_cache.dtype) for x in (k, v))
        keys, values = kv_cache.flatten(1, 2)  # [num_slots, KVH, D] each
        keys.index_copy_(0, self._slots, k)
        values.index_copy_(0, self._slots, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        self.write(k, v, kv_cache)
        for start, end, seq_len, blocks, mask in self._requests:
            gathered = kv_cache[:, blocks].flatten(1, 2)[:, :seq_len].to(q.dtype)  # [2, S, KVH, D]
            if mask is None:
                out[start:end] = self._attend(q[start:end], gathered, mask)
                continue
            # A mask multiplies by zero, and zero times NaN is NaN: tokens would be spoilt by one
            # that comes after them, and with them other requests that share their blocks. So what
            # is not finite becomes zero, and spoils those who see it: itself and all behind. What
            # is behind the queries' beginning alone can be hidden from any.
            last = gathered[:, start - end :]
            is_broken = ~torch.isfinite(last).all(3).all(2).all(0)  # [Q]
            last.masked_fill_(is_broken[:, None, None], 0.0)
            attended = self._attend(q[start:end], gathered, mask)
            is_spoilt = is_broken.cumsum(0) > 0
            out[start:end] = attended.masked_fill(is_spoilt[:, None, None], torch.nan)

    def _attend(self, q: Tensor, gathered: Tensor, mask: Tensor | None) -> Tensor:
        """q: [Q, H, D]; gathered: [2, S, KVH, D]; mask: [Q, S] bool. Returns [Q, H, D]."""
        attended = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            gathered[0].transpose(0, 1)[None],
            gathered[1].transpose(0, 1)[None],
            attn_mask=mask,
            scale=self.scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)
