"""Device: what differs between processors, in one place. Everything above asks here.

CPU is a device like any other. What CUDA needs is imported only when a GPU is asked for.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nano.device.cpu import CpuDevice
from nano.device.graph import GraphPool
from nano.device.memory import Memory
from nano.device.transfers import HostCopy, HostTransfers, Transfers

__all__ = ["Device", "CpuDevice", "HostCopy", "HostTransfers", "Transfers", "make_device"]


class Device(Transfers, Protocol):
    """Where a worker computes. Made once per process."""

    @property
    def kind(self) -> str: ...

    @property
    def supports_graphs(self) -> bool:
        """Whether work can be captured: `graph_pool` may be called."""

    @property
    def memory(self) -> Memory | None:
        """To be measured; None if nobody knows whose it is."""

    @property
    def traits(self) -> dict[str, str]:
        """What compiled code and its bits depend on, by name. Of a CPU its own compilers ask."""

    def synchronize(self) -> None:
        """Wait until everything queued is done."""

    def graph_pool(self) -> GraphPool: ...

    def free_memory(self) -> int:
        """Bytes that can still be taken."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised, for as long as the device is used: where its steps read fastest.

        Raises `MemoryError` or `RuntimeError`.
        """


def make_device(kind: str, num_threads: int | None = None) -> Device:
    """The device called `kind`: "cpu", "cuda", "cuda:1", "GPU-<uuid>" or "MIG-<uuid>".

    `num_threads` of the host compute (None: one per core). Raises `ConfigError`.
    """
    if kind == "cpu":
        return CpuDevice(num_threads)
    from nano.device.cuda import CudaDevice

    return CudaDevice(kind, num_threads)
