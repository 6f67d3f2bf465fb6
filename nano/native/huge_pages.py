"""empty_bytes: memory in pages of 2 MB, where the system has them.

For what a step reads all over, as weights and the KV cache: the CPU's prefetches end at a page that
has to be looked up first. From pages of 4 KB one thread read weights at 15 to 18 GB/s of the 30
that it gets in huge ones.
"""

import mmap

import torch
from torch import Tensor


def empty_bytes(num_bytes: int) -> Tensor:
    """[num_bytes] uint8, not yet backed by memory, given back with the last tensor in it.

    Raises `MemoryError`.
    """
    # Private, because shared memory has no huge pages.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        region = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)[:num_bytes]
