"""Memory of a device: what is measured of it, and what is left for the KV cache.

Nothing here is estimated. Weights are loaded, a worst-case step is run, graphs are captured over
a KV cache of a few blocks; each is measured, and the cache gets its share of what remains.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

from nano.errors import ConfigError

_GIB = 2**30


class Memory(Protocol):
    """A device's memory. All in bytes."""

    def total(self) -> int: ...

    def free(self) -> int:
        """What the device would still give, once the allocator's unused blocks are returned."""

    def allocated(self) -> int:
        """Held by this process's tensors."""

    def peak(self) -> int:
        """Most that was `allocated` at once since `reset_peak`."""

    def reset_peak(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What is not for the KV cache, in bytes."""

    others: int = 0  # other processes, and the driver's own context
    weights: int = 0  # of all models
    activations: int = 0  # peak of a worst-case step
    graphs: int = 0

    @property
    def num_bytes(self) -> int:
        return self.others + self.weights + self.activations + self.graphs


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The arithmetic of one device, and the words for it."""

    total: int
    use: MemoryUse
    fraction: float  # of the rest that the KV cache gets

    @property
    def rest(self) -> int:
        return self.total - self.use.num_bytes

    @property
    def kv_cache(self) -> int:
        return int(max(self.rest, 0) * self.fraction)

    def table(self) -> str:
        rows = [("device", self.total)]
        rows += [(f"- {field.name}", getattr(self.use, field.name)) for field in fields(self.use)]
        rows += [("= rest", self.rest), (f"KV cache ({self.fraction:.0%} of it)", self.kv_cache)]
        return "\n".join(f"  {name:<24}{size / _GIB:>9.3f} GiB" for name, size in rows)

    def require(self, num_bytes: int, what: str) -> None:
        """Raises `ConfigError` with the table unless the KV cache has room for `num_bytes`."""
        if self.kv_cache < num_bytes:
            raise ConfigError(
                f"the KV cache has no room for {what}: {num_bytes / _GIB:.3f} GiB are needed, and "
                f"gpu_memory_utilization={self.fraction} leaves {self.kv_cache / _GIB:.3f} GiB\n"
                + self.table()
            )


class MemoryMeter:
    """Measures one use after the other. Made before the first tensor is."""

    def __init__(self, memory: Memory):
        self._memory = memory
        self._sizes = {"others": memory.total() - memory.free()}

    @contextmanager
    def growth(self, use: str) -> Iterator[None]:
        """`use` grows by what is gone at the end of the block and was free at its beginning."""
        before = self._memory.free()
        yield
        self._sizes[use] = self._sizes.get(use, 0) + max(before - self._memory.free(), 0)

    @contextmanager
    def peak(self, use: str, apart_from: int = 0) -> Iterator[None]:
        """`use` is the most that was allocated at once inside this block or an earlier one.

        `apart_from` bytes of it are the measurement's own: the KV cache of a made-up step.
        """
        self._memory.reset_peak()
        before = self._memory.allocated()
        yield
        taken = self._memory.peak() - before - apart_from
        self._sizes[use] = max(self._sizes.get(use, 0), taken)

    def budget(self, fraction: float) -> MemoryBudget:
        return MemoryBudget(self._memory.total(), MemoryUse(**self._sizes), fraction)
