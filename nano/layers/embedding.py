"""Token embedding, and the logits of models that tie their output to it. V vocab, T tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """ids [T] -> [T, hidden]. The weight [V, hidden] is uninitialised: a loader fills it."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, hidden] -> [L, V] through the same weight."""
        return functional.linear(hidden, self.weight)
