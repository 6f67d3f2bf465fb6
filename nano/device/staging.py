"""Staging: how arrays of the host reach a device without anybody waiting.

A copy from ordinary memory makes the host wait; one from pinned memory is queued, and reads its
source some time later. So each array goes through a pinned buffer that nothing rewrites until the
event behind its copy has passed. The caller may rewrite the array at once. The way back is in
reading.py.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_SMALLEST = 4096  # bytes


class Event(Protocol):
    """A mark in the device's queue."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether the device has passed the mark."""

    def synchronize(self) -> None:
        """Wait until it has."""


@dataclass(slots=True)
class PinnedBuffer:
    memory: Tensor  # [size] uint8, pinned; a power of two
    event: Event  # behind the copy that last used it


class PinnedMemory:
    """The pinned buffers that no copy is using, by size."""

    def __init__(self, allocate: Callable[[int], Tensor], make_event: Callable[[], Event]):
        """`allocate(size)` gives [size] uint8 of pinned host memory."""
        self._allocate = allocate
        self._make_event = make_event
        self._unused: dict[int, list[PinnedBuffer]] = {}

    def take(self, num_bytes: int) -> PinnedBuffer:
        """One of at least `num_bytes`, the caller's own until it is put back."""
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        unused = self._unused.get(size)
        return unused.pop() if unused else PinnedBuffer(self._allocate(size), self._make_event())

    def put_back(self, buffer: PinnedBuffer) -> None:
        self._unused.setdefault(len(buffer.memory), []).append(buffer)


class Staging:
    """Owns the buffers of the copies to one device: as many as are in flight."""

    def __init__(self, device: torch.device, memory: PinnedMemory):
        self._device = device
        self._memory = memory
        self._in_flight: deque[PinnedBuffer] = deque()  # in the order of their copies

    def to_device(self, array: np.ndarray) -> Tensor:
        """A copy on the device, contiguous, of the same shape and dtype; queued, not awaited."""
        while self._in_flight and self._in_flight[0].event.query():
            self._memory.put_back(self._in_flight.popleft())
        buffer = self._memory.take(array.nbytes)
        source = torch.from_numpy(
            buffer.memory.numpy()[: array.nbytes].view(array.dtype).reshape(array.shape)
        )
        np.copyto(source.numpy(), array)
        copy = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        copy.copy_(source, non_blocking=True)
        buffer.event.record()
        self._in_flight.append(buffer)
        return copy
