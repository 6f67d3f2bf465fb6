"""Paged attention by elementwise torch: slow, and the same bits in any batch, chunk and block size.

Torch's matrix products and sums choose their order by shape, alignment and threads. Elementwise
operations have none, so here every sum is a tree of elementwise additions.

T tokens, n of them at a time, S positions, H query heads, KVH key/value heads, G = H / KVH, D head
dim.
"""

import numpy as np
import torch
from torch import Tensor

from nano.attention.backend import AttentionMetadata
from nano.attention.torch_backend import TorchBackend
from nano.kv_spec import LayerKVSpec

_PAIRS_AT_ONCE = 4096  # of (token, position): bounds the memory of the products, [n, S, H, D]


class ExactTorchBackend(TorchBackend):
    """What serves without a compiler when numerics are to be exact. Every token attends alone.

    A token's row may be padded to the longest beside it: the padding is hidden, and adds nothing to
    any sum, not even to the sign of a zero.
    """

    name = "torch-exact"

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"it runs on cpu only, not on {device.type}"
        return super().unsupported_reason(spec, device)

    def plan(self, metadata: AttentionMetadata) -> None:
        self._slots = metadata.slot_mapping[: metadata.num_tokens]
        counts = np.diff(metadata.query_start_loc)
        request = np.repeat(np.arange(metadata.num_requests), counts)  # [T]
        behind = np.repeat(metadata.query_start_loc[1:], counts) - np.arange(metadata.num_tokens)
        num_seen = metadata.seq_lens[request] - behind + 1  # [T]: itself and all before
        table = metadata.block_table.numpy()
        # (tokens, their positions' slots [n, S], which of these they see [n, S])
        self._parts: list[tuple[slice, Tensor, Tensor]] = []
        start = 0
        while start < metadata.num_tokens:
            end = start + 1
            longest = int(num_seen[start])
            while end < metadata.num_tokens:
                longest = max(longest, int(num_seen[end]))
                if longest * (end + 1 - start) > _PAIRS_AT_ONCE:
                    break
                end += 1
            part = slice(start, end)
            positions = np.arange(num_seen[part].max())
            is_seen = positions < num_seen[part, None]
            read = np.where(is_seen, positions, 0)  # what is hidden may have no block at all
            blocks = table[request[part, None], read // self.block_size]
            slots = blocks.astype(np.int64) * self.block_size + read % self.block_size
            self._parts.append((part, torch.from_numpy(slots), torch.from_numpy(is_seen)))
            start = end

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        self.write(k, v, kv_cache)
        keys, values = kv_cache.flatten(1, 2)  # [num_slots, KVH, D] each
        num_kv_heads = keys.shape[1]
        for part, slots, is_seen in self._parts:
            grouped = (q[part] * self.scale).unflatten(1, (num_kv_heads, -1))  # [n, KVH, G, D]
            seen_keys, seen_values = (x[slots].to(q.dtype).unsqueeze(3) for x in (keys, values))
            scores = tree_sum(seen_keys * grouped[:, None], 4)  # [n, S, KVH, G]
            scores.masked_fill_(~is_seen[:, :, None, None], -torch.inf)
            weights = (scores - scores.amax(1, keepdim=True)).exp_()
            products = weights[..., None] * seen_values  # [n, S, KVH, G, D]
            products.masked_fill_(~is_seen[:, :, None, None, None], -0.0)
            mass = tree_sum(weights, 1)
            out[part] = (tree_sum(products, 1) / mass[..., None]).flatten(1, 2)


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim`, using x up. Which element is added to which depends on their indices only.

    So elements of -0 at the end, however many, change nothing.
    """
    while (size := x.shape[dim]) > 1:
        half = 1 << (size - 1).bit_length() - 1
        rest = size - half
        x.narrow(dim, 0, rest).add_(x.narrow(dim, half, rest))
        x = x.narrow(dim, 0, half)
    return x.squeeze(dim)
