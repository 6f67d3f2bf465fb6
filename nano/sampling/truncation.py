"""Top-k, top-p and min-p: which tokens of one row can be drawn, without sorting the vocabulary.

Order is vLLM's: min-p against the best token, then top-k, then top-p over what is left,
renormalised. Tokens tied with the last one kept are kept too, so the result is a function of the
values alone, never of an order of equals.

This reads numbers on the host as it goes; cuts.py does the same for many rows on a device.
"""

import math

import torch
from torch import Tensor

_SORT_LIMIT = 4096  # below this a plain sort is faster than a histogram
_NUM_BINS = 0x3F80 + 1  # bins by the top 16 bits of a float32 in [0, 1]; 0x3F80 is 1.0


def survivors(logits: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    """Which tokens survive truncation, [V] bool with at least one True; None if all do.

    logits: [V], scaled by the temperature, best one 0, -inf where banned.
    """
    cuts = []
    if min_p > 0.0:
        cuts.append(math.log(min_p))
    if 0 < top_k < logits.numel():
        cuts.append(float(torch.topk(logits, top_k, sorted=False).values.min()))
    mask = logits >= max(cuts) if cuts else None
    if top_p < 1.0:
        weights = logits.exp()
        if mask is not None:
            weights *= mask
        mask = weights >= top_p_threshold(weights, top_p)
    return mask


def top_p_threshold(weights: Tensor, top_p: float) -> float:
    """The smallest weight in the smallest set of largest weights that holds `top_p` of the mass.

    weights: [N] unnormalised, in [0, 1], not all zero. The result is positive.
    """
    if weights.numel() <= _SORT_LIMIT:
        weights = weights[weights > 0]
        return _threshold_by_sort(weights, top_p * float(weights.sum(dtype=torch.float64)), 0.0)
    # One pass sums the mass per bin of leading bits; only the bin where the mass is reached is
    # sorted. bincount adds in index order, so the sums do not depend on threads.
    bins = weights.to(torch.float32).view(torch.int32) >> 16
    mass = torch.bincount(bins, weights=weights.to(torch.float64), minlength=_NUM_BINS)
    mass_from = mass.flip(0).cumsum(0).flip(0)  # [bin]: mass of this bin and all above
    target = top_p * float(mass_from[0])
    crossing = int((mass_from >= target).sum()) - 1  # the highest bin that reaches the target
    above = float(mass_from[crossing] - mass[crossing])
    return _threshold_by_sort(weights[bins == crossing], target, above)


def _threshold_by_sort(weights: Tensor, target: float, mass_above: float) -> float:
    """The weight at which the running mass, from `mass_above` on, reaches `target`."""
    ordered = weights.sort(descending=True).values
    reached = ordered.cumsum(0, dtype=torch.float64) + mass_above >= target
    # Rounding may leave the very last sum a hair short; then everything is kept.
    first = int(reached.to(torch.int8).argmax()) if bool(reached[-1]) else -1
    return float(ordered[first])
