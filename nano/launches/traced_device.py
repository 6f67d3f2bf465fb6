"""TracedDevice: the device of a worker that is listened to. Tells copies, reads, and replays."""

import linecache
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, cast

import numpy as np
from torch import Tensor

from nano.device import Device
from nano.device.graph import Graph, GraphPool
from nano.device.transfers import HostCopy
from nano.launches.sequence import LaunchSequence


class TracedDevice:
    """A `Device`: what is not traced is the inner one's."""

    def __init__(self, inner: Device, sequence: LaunchSequence, model: str | None = None):
        """model: whose inputs it copies; None leaves that open, of a device that all share."""
        self._inner = inner
        self._sequence = sequence
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def to_device(self, array: np.ndarray) -> Tensor:
        if self._model is not None:
            self._sequence.model = self._model
        what = f"{_what_is_copied(sys._getframe(1)):<16} {list(array.shape)} {array.dtype}"
        self._sequence.add("copy", what)
        with self._sequence.hiding():
            return self._inner.to_device(array)

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        what = ", ".join(f"{list(x.shape)} {str(x.dtype)[6:]}" for x in tensors)
        self._sequence.add("read", what)
        with self._sequence.hiding():
            return TracedCopy(self._inner.to_host(tensors), self._sequence)

    def graph_pool(self) -> GraphPool:
        return TracedPool(self._inner.graph_pool(), self._sequence)


class TracedCopy:
    """A `HostCopy`. Its first wait is the one that counts."""

    def __init__(self, inner: HostCopy, sequence: LaunchSequence):
        self._inner = inner
        self._sequence = sequence
        self._is_here = False

    def wait(self) -> list[np.ndarray]:
        if not self._is_here:
            self._sequence.add("wait", "for the read")
            self._is_here = True
        with self._sequence.hiding():
            return self._inner.wait()


class TracedPool:
    """A `GraphPool` whose graphs tell which piece of their capture they are."""

    def __init__(self, inner: GraphPool, sequence: LaunchSequence):
        self._inner = inner
        self._sequence = sequence
        self._num_graphs = 0  # of the capture that is under way

    def capturing(self) -> AbstractContextManager[None]:
        self._num_graphs = 0
        return self._inner.capturing()

    def new_graph(self) -> Graph:
        self._num_graphs += 1
        return TracedGraph(self._inner.new_graph(), self._sequence, self._num_graphs)

    def alias(self, tensor: Tensor) -> Tensor:
        return self._inner.alias(tensor)


class TracedGraph:
    """A `Graph`."""

    def __init__(self, inner: Graph, sequence: LaunchSequence, number: int):
        self._inner = inner
        self._sequence = sequence
        self._number = number
        self.begin, self.end = inner.begin, inner.end

    def replay(self) -> None:
        self._sequence.add("replay", f"piece {self._number}")
        with self._sequence.hiding():
            self._inner.replay()


def as_device(device: TracedDevice) -> Device:
    """It has all that the protocol asks for, some of it by name only."""
    return cast(Device, device)


def _what_is_copied(frame: FrameType) -> str:
    """What a call in progress in `frame` was given, if that is a name; else who calls."""
    code = frame.f_code
    line, end_line, begin, end = list(code.co_positions())[frame.f_lasti // 2]
    if line is not None and line == end_line:
        source = linecache.getline(code.co_filename, line).encode()[begin:end].decode()
        argument = source.partition("(")[2].removesuffix(")")
        if argument.isidentifier():
            return argument
    return code.co_name.strip("_<>")
