"""Bucket sizes: which sizes of a step are worth a graph. Torch-free arithmetic.

A step is padded to the next bucket, so more buckets waste less and cost more memory and time to
capture.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np

_ASSUMED_SHARE = 0.1  # of the steps that were seen


def ladder(largest: int) -> tuple[int, ...]:
    """1, 2, 4, multiples of 8 to 64, then four sizes for each doubling: at most a fifth of a
    bucket above 64 is padding. Ends in `largest`."""
    sizes = [1, 2, 4, *range(8, 64, 8)]
    base = 64
    while base < largest:
        sizes += range(base, 2 * base, base // 4)
        base *= 2
    return (*(size for size in sizes if size < largest), largest)


def best_buckets(histogram: Mapping[int, float], num_buckets: int) -> tuple[int, ...]:
    """`num_buckets` sizes (or all, if fewer were seen), rising, that pad the observed steps least.

    `histogram`: size -> how often it was seen. All of them fit the last bucket. Exact: some best
    choice consists of observed sizes, and whatever lies before its last bucket is a best choice
    for the sizes it serves. Takes num_buckets * len(histogram)^2 steps, of numpy's.
    """
    sizes = np.array(sorted(size for size, count in histogram.items() if count > 0))
    counts = np.array([histogram[size] for size in sizes], np.float64)
    # Of the j smallest sizes: how many steps, and their tokens.
    steps = np.concatenate([[0.0], counts.cumsum()])
    tokens = np.concatenate([[0.0], (sizes * counts).cumsum()])
    # [i, j]: padding of the sizes i ... j in one bucket
    padding = sizes * (steps[1:] - steps[:-1, None]) - (tokens[1:] - tokens[:-1, None])
    padding[np.tri(len(sizes), k=-1, dtype=bool)] = np.inf
    least = np.full(len(sizes) + 1, np.inf)  # [j]: padding of the j smallest sizes
    least[0] = 0.0
    begins: list[np.ndarray] = []  # [bucket][j]: where the last bucket of these begins
    for _ in range(min(num_buckets, len(sizes))):
        total = least[:-1, None] + padding
        begins.append(total.argmin(0))
        least = np.concatenate([[np.inf], total.min(0)])
    buckets, j = [], len(sizes)
    for begin in reversed(begins):
        buckets.append(int(sizes[j - 1]))
        j = int(begin[j - 1])
    return tuple(reversed(buckets))


def fitted_buckets(buckets: tuple[int, ...], histogram: Mapping[int, int]) -> tuple[int, ...]:
    """As many buckets as `buckets`, the largest among them, that pad the observed steps less.

    So they take no more memory, and whatever fitted still fits. A tenth of the weight lies on the
    sizes of `buckets`, evenly: a load that changes shall not find everything else padded to the
    largest.
    """
    num_steps = sum(histogram.values())
    if not num_steps:
        return buckets
    weights = dict.fromkeys(buckets, _ASSUMED_SHARE * num_steps / len(buckets))
    for size, count in histogram.items():
        weights[size] = weights.get(size, 0.0) + count
    return best_buckets(weights, len(buckets))


def bucket_of(size: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket, of rising ones, that `size` fits; None if it fits none."""
    index = bisect_left(buckets, size)
    return buckets[index] if index < len(buckets) else None
