"""Token embedding, and the logits of models that tie their output to it. V vocab, T tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano.layers.cpu_linear import PackedWeight


class Embedding(nn.Module):
    """ids [T] -> [T, hidden]. The weight [V, hidden] is uninitialised: a loader fills it."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self.packed: PackedWeight | None = None

    def pack(self) -> None:
        """Keep a second copy for `logits`, as our CPU kernel reads it; looking up needs rows."""
        self.packed = PackedWeight(self.weight, bias=None)

    def forward(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, hidden] -> [L, V] through the same weight."""
        if self.packed is not None:
            out: Tensor = self.packed(hidden)
            return out
        return functional.linear(hidden, self.weight)
