"""Top-k, top-p and min-p: which tokens of one row can be drawn, without sorting the vocabulary.

Order is vLLM's: min-p against the best token, then top-k, then top-p over what is left,
renormalised. Tokens tied with the last one kept are kept too, so the result is a function of the
values alone, never of an order of equals.
"""

import math

import torch
from torch import Tensor

_SORT_LIMIT = 4096  # below this a plain sort is faster than a histogram
_NUM_BINS = 0x3F80 + 1  # bins by the top 16 bits of a float32 in [0, 1]; 0x3F80 is 1.0


def surviving_token_ids(logits: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor | None:
    """Ids that survive truncation, ascending; None if all do.

    logits: [V], scaled by the temperature, -inf where banned. Result: [N] int64, N >= 1.
    """
    token_ids: Tensor | None = None
    values = logits
    if min_p > 0.0:
        threshold = values.max() + math.log(min_p)
        token_ids, values = _keep(values >= threshold, token_ids, values)
    if 0 < top_k < values.numel():
        threshold = torch.topk(values, top_k, sorted=False).values.min()
        token_ids, values = _keep(values >= threshold, token_ids, values)
    if top_p < 1.0:
        weights = (values - values.max()).exp_()
        threshold = top_p_threshold(weights, top_p)
        token_ids, values = _keep(weights >= threshold, token_ids, values)
    return token_ids


def top_p_threshold(weights: Tensor, top_p: float) -> Tensor:
    """The smallest weight in the smallest set of largest weights that holds `top_p` of the mass.

    weights: [N] unnormalised, in [0, 1]. Returns a scalar tensor of the same dtype.
    """
    if weights.numel() <= _SORT_LIMIT:
        return _threshold_by_sort(weights, top_p * weights.sum(dtype=torch.float64), 0.0)
    # One pass sums the mass per bin of leading bits; only the bin where the mass is reached is
    # sorted. bincount adds in index order, so the sums do not depend on threads.
    narrow = weights.to(torch.float32)
    bins = narrow.view(torch.int32) >> 16
    mass = torch.bincount(bins, weights=weights.to(torch.float64), minlength=_NUM_BINS)
    mass_from = mass.flip(0).cumsum(0).flip(0)  # [bin]: mass of this bin and all above
    target = top_p * mass_from[0]
    crossing = int((mass_from >= target).sum()) - 1  # highest bin that reaches the target
    above = mass_from[crossing + 1] if crossing + 1 < mass_from.numel() else 0.0
    return _threshold_by_sort(weights[bins == crossing], target, above)


def _threshold_by_sort(weights: Tensor, target: Tensor, mass_above: Tensor | float) -> Tensor:
    """The weight at which the running mass, from `mass_above` on, reaches `target`."""
    ordered = weights.sort(descending=True).values
    reached = ordered.cumsum(0, dtype=torch.float64) + mass_above >= target
    # Rounding may leave the very last sum a hair short; then everything is kept.
    first = int(reached.to(torch.int8).argmax()) if bool(reached[-1]) else -1
    return ordered[first]


def _keep(mask: Tensor, token_ids: Tensor | None, values: Tensor) -> tuple[Tensor, Tensor]:
    kept = mask.nonzero().squeeze(1)
    return kept if token_ids is None else token_ids[kept], values[kept]
