"""Cuts: top-k, top-p and min-p of many rows at once, where the host may not look at a number.

The twin of truncation.py, which looks at one row at a time and at every number it needs. Here a row
is truncated by a value, its cut: what lies below cannot be drawn, so tokens tied with the last one
kept are kept. N rows of V logits.
"""

import numpy as np
import torch
from torch import Tensor

from nano.device import Transfers

_MOST_SORTED = 2**22  # logits at once: sorting them takes ten times their memory


def is_truncated(draws: np.ndarray) -> np.ndarray:
    """Which rows of `draws` [N, 4] (see `DrawTable`) may lose tokens: [N] bool."""
    _, top_p, min_p, top_k = draws.T
    found: np.ndarray = (draws[:, 0] > 0) & ((top_p < 1) | (min_p > 0) | (top_k > 0))
    return found


def find_cuts(scaled: Tensor, draws: np.ndarray, transfers: Transfers) -> Tensor:
    """The lowest logit that each row keeps, [N]; -inf where it keeps all.

    scaled: [N, V], scaled by the temperature, the best 0, -inf where banned, no NaN. draws: [N, 4].
    """
    vocab_size = scaled.shape[1]
    _, top_p, min_p, top_k = draws.T
    with np.errstate(divide="ignore"):
        cuts = transfers.to_device(np.log(min_p)).to(scaled.dtype)
    index = np.flatnonzero((top_p < 1) | ((top_k > 0) & (top_k < vocab_size)))
    if not len(index):
        return cuts
    last = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size) - 1
    of_rows = (index, last[index].astype(np.int64), top_p[index])
    size = max(1, _MOST_SORTED // vocab_size)
    for at, k, share in zip(*(transfers.to_device(array).split(size) for array in of_rows)):
        # Sorted are values, not tokens: equals have no order that could matter.
        ordered = scaled.index_select(0, at).sort(dim=1, descending=True).values
        lowest = torch.maximum(cuts.index_select(0, at), ordered.gather(1, k[:, None])[:, 0])
        cuts.index_copy_(0, at, _top_p_cuts(ordered, lowest, share))
    return cuts


def _top_p_cuts(ordered: Tensor, lowest: Tensor, top_p: Tensor) -> Tensor:
    """[N]: the lowest of the fewest largest logits that hold `top_p` of the mass.

    ordered: [N, V] falling, overwritten; what is below `lowest` [N] has no mass. top_p: [N]
    float64; of rows where it is 1, `lowest` stays.
    """
    # Masses are summed as integers, 2**62 for all of a vocabulary at most. So the sums are exact,
    # and no order of summation, hence no other row, can move a cut. What is lost of each weight is
    # less than the rounding of its exponential, the best one being 1.
    unit = 2.0 ** (62 - ordered.shape[1].bit_length())
    weights = ordered.exp().mul_(unit).masked_fill_(ordered < lowest[:, None], 0.0)
    mass = weights.to(torch.int64).cumsum(1)
    first = (mass < mass[:, -1:] * top_p[:, None]).sum(1, keepdim=True)  # that reaches it
    cuts = ordered.masked_fill_(weights < weights.gather(1, first), torch.inf).amin(1)
    return torch.where(top_p < 1, cuts, lowest)
