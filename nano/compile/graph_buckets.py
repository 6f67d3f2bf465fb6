"""Bucket sizes: which sizes of a step are worth a graph. Torch-free arithmetic.

A step is padded to the next bucket, so more buckets waste less and cost more memory and time to
capture.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf


def ladder(largest: int) -> tuple[int, ...]:
    """1, 2, 4, multiples of 8 to 64, then four sizes for each doubling: at most a fifth of a
    bucket above 64 is padding. Ends in `largest`."""
    sizes = [1, 2, 4, *range(8, 64, 8)]
    base = 64
    while base < largest:
        sizes += range(base, 2 * base, base // 4)
        base *= 2
    return (*(size for size in sizes if size < largest), largest)


def best_buckets(histogram: Mapping[int, int], num_buckets: int) -> tuple[int, ...]:
    """`num_buckets` sizes (or all, if fewer were seen), rising, that pad the observed steps least.

    `histogram`: size -> how often it was seen. All of them fit the last bucket. Exact: some best
    choice consists of observed sizes, and whatever lies before its last bucket is a best choice
    for the sizes it serves. Takes num_buckets * len(histogram)^2 steps.
    """
    sizes = sorted(size for size, count in histogram.items() if count > 0)
    # Of the j smallest sizes: how many steps, and their tokens.
    steps = [0, *accumulate(histogram[size] for size in sizes)]
    tokens = [0, *accumulate(size * histogram[size] for size in sizes)]

    def padding(i: int, j: int) -> int:
        """Of the sizes i ... j - 1 in one bucket."""
        return sizes[j - 1] * (steps[j] - steps[i]) - (tokens[j] - tokens[i])

    least: list[float] = [0, *[inf] * len(sizes)]  # [j]: padding of the j smallest sizes
    begins: list[list[int]] = []  # [bucket][j]: where the last bucket of these begins
    for _ in range(min(num_buckets, len(sizes))):
        begin = [
            min(range(j), key=lambda i: least[i] + padding(i, j)) for j in range(1, len(least))
        ]
        least = [inf, *(least[i] + padding(i, j) for j, i in enumerate(begin, start=1))]
        begins.append([0, *begin])
    buckets, j = [], len(sizes)
    for begin in reversed(begins):
        buckets.append(sizes[j - 1])
        j = begin[j]
    return tuple(reversed(buckets))


def bucket_of(size: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket, of rising ones, that `size` fits; None if it fits none."""
    index = bisect_left(buckets, size)
    return buckets[index] if index < len(buckets) else None
