"""Reading: how results of a device reach the host while both go on.

A copy to ordinary memory makes the host wait for everything queued before it. One to pinned memory
is queued like any other work, and whoever needs the values waits for the event behind it. A buffer
belongs to its copy until that is done; one that nobody waits for is given up with it.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from nano.device.staging import PinnedBuffer, PinnedMemory

_ALIGNMENT = 16  # bytes; of every dtype


class Reading:
    """Owns nothing but the way: buffers are those of `memory`."""

    def __init__(self, memory: PinnedMemory):
        self._memory = memory

    def to_host(self, tensors: Sequence[Tensor]) -> "PinnedCopy":
        """As `Transfers.to_host`: all in one buffer, with one event."""
        offsets, num_bytes = [], 0
        for tensor in tensors:
            offsets.append(num_bytes)
            num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._memory.take(num_bytes)
        pinned = []
        for tensor, offset in zip(tensors, offsets):
            part = buffer.memory[offset : offset + tensor.nbytes]
            pinned.append(part.view(tensor.dtype).view(tensor.shape))
            pinned[-1].copy_(tensor, non_blocking=True)
        buffer.event.record()
        return PinnedCopy(self._memory, buffer, pinned)


class PinnedCopy:
    """As `HostCopy` says. The arrays are copies of their own: the buffer goes on to serve."""

    def __init__(self, memory: PinnedMemory, buffer: PinnedBuffer, pinned: list[Tensor]):
        self._memory = memory
        self._buffer = buffer
        self._pinned = pinned
        self._arrays: list[np.ndarray] | None = None

    def wait(self) -> list[np.ndarray]:
        if self._arrays is None:
            self._buffer.event.synchronize()
            self._arrays = [tensor.numpy().copy() for tensor in self._pinned]
            self._pinned.clear()
            self._memory.put_back(self._buffer)
        return self._arrays
