"""Staging: how arrays of the host reach a device without anybody waiting.

A copy from ordinary memory makes the host wait; one from pinned memory is queued, and reads its
source some time later. So each array goes through a pinned buffer that nothing rewrites until the
event behind its copy has passed. The caller may rewrite the array at once.
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


@dataclass(slots=True)
class _Buffer:
    memory: Tensor  # [size] uint8, pinned; a power of two
    event: Event  # behind the copy that last read it


class Staging:
    """Owns the pinned buffers of one device: as many as there are copies in flight."""

    def __init__(
        self,
        device: torch.device,
        allocate: Callable[[int], Tensor],
        make_event: Callable[[], Event],
    ):
        """`allocate(size)` gives [size] uint8 of pinned host memory."""
        self._device = device
        self._allocate = allocate
        self._make_event = make_event
        self._in_flight: deque[_Buffer] = deque()  # in the order of their copies
        self._free: dict[int, list[_Buffer]] = {}  # by size

    def to_device(self, array: np.ndarray) -> Tensor:
        """A copy on the device, contiguous, of the same shape and dtype; queued, not awaited."""
        buffer = self._take(array.nbytes)
        source = torch.from_numpy(
            buffer.memory.numpy()[: array.nbytes].view(array.dtype).reshape(array.shape)
        )
        np.copyto(source.numpy(), array)
        copy = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        copy.copy_(source, non_blocking=True)
        buffer.event.record()
        self._in_flight.append(buffer)
        return copy

    def _take(self, num_bytes: int) -> _Buffer:
        while self._in_flight and self._in_flight[0].event.query():
            buffer = self._in_flight.popleft()
            self._free.setdefault(len(buffer.memory), []).append(buffer)
        size = max(_SMALLEST, 1 << (num_bytes - 1).bit_length())
        unused = self._free.get(size)
        if unused:
            return unused.pop()
        return _Buffer(self._allocate(size), self._make_event())
