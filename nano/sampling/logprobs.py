"""Log probabilities of chosen tokens and of the best alternatives."""

import torch
from torch import Tensor

from nano.sampling.select import select_backend
from nano.step import TokenLogprobs


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Logprobs of `token_ids` and the `num_top` best (-1: all), row by row.

    logits: [N, V], any scale; token_ids: [N] int64. A row's figures depend on the row alone.
    """
    backend = select_backend(logits.dtype, logits.device)
    index = torch.arange(len(token_ids))
    num_top = num_alternatives(num_top, logits.shape[1])
    return backend.gather_logprobs(logits, index, token_ids, num_top)


def num_alternatives(num_top: int, vocab_size: int) -> int:
    """How many alternatives a request gets that asks for `num_top` (-1: all)."""
    return vocab_size if num_top < 0 else min(num_top, vocab_size)
