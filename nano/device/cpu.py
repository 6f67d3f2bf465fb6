"""CpuDevice: main memory and the cores of this machine."""

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from nano.device.graph import GraphPool
from nano.device.memory import Memory
from nano.device.transfers import HostTransfers
from nano.native.huge_pages import empty_bytes
from nano.native.threads import set_num_threads


class CpuDevice(HostTransfers):
    """A device like any other: a plain copy where CUDA stages, and nothing to wait for."""

    kind = "cpu"
    supports_graphs = False
    memory: Memory | None = None  # shared with everything else on the machine: a share is taken

    def __init__(self, num_threads: int | None = None):
        self.num_threads = set_num_threads(num_threads)

    @property
    def traits(self) -> dict[str, str]:
        return {}

    def synchronize(self) -> None:
        """Wait until everything queued is done. Nothing is ever queued on CPU."""

    def graph_pool(self) -> GraphPool:
        raise AssertionError("a CPU has no graphs, as `supports_graphs` says")

    def free_memory(self) -> int:
        """Bytes that can still be taken: free memory within the container's limit."""
        page = os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") * page
        try:
            with open("/proc/meminfo") as meminfo:
                for line in meminfo:
                    if line.startswith("MemAvailable:"):
                        free = int(line.split()[1]) * 1024
            with open("/sys/fs/cgroup/memory.max") as limit_file:
                limit = limit_file.read().strip()
            with open("/sys/fs/cgroup/memory.current") as used_file:
                used = int(used_file.read())
            if limit != "max":
                free = min(free, int(limit) - used)
        except (OSError, ValueError):
            pass  # not Linux, or no cgroup: what sysconf said stands
        return max(free, 0)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return empty_bytes(math.prod(shape) * dtype.itemsize).view(dtype).view(*shape)
