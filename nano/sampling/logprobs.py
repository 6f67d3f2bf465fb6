"""Log probabilities of chosen tokens and of the best alternatives."""

import torch
from torch import Tensor

from nano.step import TokenLogprobs


def gather_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TokenLogprobs:
    """Logprobs of `token_ids` and the `num_top` best (-1: all), row by row.

    logits: [N, V], any scale; token_ids: [N] int64. Rows are normalised one by one, so a row's
    figures do not depend on its neighbours.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    vocab_size = logits.shape[1]
    num_top = vocab_size if num_top < 0 else min(num_top, vocab_size)
    top = logprobs.topk(num_top, dim=1)
    return TokenLogprobs(
        token_ids=torch.cat((token_ids[:, None], top.indices), dim=1).tolist(),
        logprobs=torch.cat((chosen, top.values), dim=1).tolist(),
        ranks=ranks.tolist(),
    )
