"""Clock: time as the device sees it, what waits for the device, and its name. The one place of the
check that knows CUDA."""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

import torch

SyncMode = Literal["error", "list"]

_NANO = Path(__file__).parent.parent
_SYNCHRONIZING = "synchronizing CUDA operation"  # as torch words it


class HostWaited(Exception):
    """The host has waited for the device where it should not."""


class Clock(Protocol):
    """Marks in the device's queue of work."""

    def mark(self) -> Any:
        """Now, as far as what is queued from here on is concerned."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks. Waits for the second."""

    def watching_syncs(self, mode: SyncMode, found: Counter[str]) -> AbstractContextManager[None]:
        """A block in which the host must not wait for the device.

        "error": a wait raises `HostWaited`. "list": it is counted in `found`, by its place.
        """


class HostClock:
    """For a device that computes while the host waits: the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    @contextmanager
    def watching_syncs(self, mode: SyncMode, found: Counter[str]) -> Iterator[None]:
        yield


class CudaClock:
    """Events on the current stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    @contextmanager
    def watching_syncs(self, mode: SyncMode, found: Counter[str]) -> Iterator[None]:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("error" if mode == "error" else "warn")
            try:
                yield
            except RuntimeError as error:
                if _SYNCHRONIZING not in str(error):
                    raise
                raise HostWaited(str(error)) from error
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for warning in heard:
            if _SYNCHRONIZING in str(warning.message):
                found[place_of(warning.filename, warning.lineno)] += 1


def place_of(file: str, line: int) -> str:
    """As a reader would look it up: within this package, if it is there."""
    path = Path(file)
    inside = path.is_relative_to(_NANO)
    return f"{path.relative_to(_NANO.parent) if inside else path.name}:{line}"


def make_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


def median_seconds(clock: Clock, work: Callable[[], object], num_runs: int) -> float:
    """Of one `work` among `num_runs`, after a few that warm up."""
    for _ in range(3):
        work()
    marks = []
    for _ in range(num_runs):
        start = clock.mark()
        work()
        marks.append((start, clock.mark()))
    return median(clock.seconds(start, end) for start, end in marks)


def facts_of(device: torch.device) -> dict[str, str]:
    """What is measured on, for the report."""
    facts = {"torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": f"{properties.total_memory / 2**30:.1f}",
            "cuda": str(torch.version.cuda),
        }
    return facts
