"""Token embedding, and the logits of models that tie their output to it. V vocab, T tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano.layers.cpu_linear import fits_bfloat16
from nano.layers.kernels import Kernels
from nano.layers.packed_weight import PackedWeight


class Embedding(nn.Module):
    """ids [T] -> [T, hidden]. The weight [V, hidden] is uninitialised: a loader fills it.

    A loader of quantised weights gives a `table` instead, which knows the rows of ids by itself.
    """

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.table: nn.Module | None = None
        self.packed: PackedWeight | None = None  # a second copy for `logits`: looking up needs rows

    def pack(self, kernels: Kernels, *, for_logits: bool) -> None:
        """Trade the filled weight for what `kernels` read. Only for float32."""
        if self.weight is None:
            return
        if for_logits and self.packed is None:
            self.packed = kernels.pack(self.weight, None)
        if fits_bfloat16(self.weight):  # half the memory, the same values
            self.table = _BFloat16Table(self.weight)
            self.weight = None

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.table is not None:
            rows: Tensor = self.table(token_ids)
            return rows
        assert self.weight is not None
        return functional.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, hidden] -> [L, V] through the same weight."""
        if self.packed is not None:
            out: Tensor = self.packed(hidden)
            return out
        assert self.weight is not None
        return functional.linear(hidden, self.weight)


class _BFloat16Table(nn.Module):
    """Rows stored as bfloat16 and looked up as float32."""

    weight: Tensor  # [V, hidden] bfloat16

    def __init__(self, weight: Tensor):
        super().__init__()
        self.register_buffer("weight", weight.detach().to(torch.bfloat16), persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight).float()
