"""Graph: work of a device, recorded once and replayed. What captures steps knows only this.

The CUDA implementation is in cuda_graph.py; tests bring one that records on a CPU.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class Graph(Protocol):
    """What was queued between `begin` and `end`, to be queued again as often as one likes.

    A replay reads and writes the very addresses of the capture and runs no Python.
    """

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None: ...


class GraphPool(Protocol):
    """Memory that the graphs of one model share.

    They take turns: what one graph leaves in the pool lasts until a graph of another capture is
    replayed.
    """

    def capturing(self) -> AbstractContextManager[None]:
        """Around the warm-up and the graphs of one capture, whose values last between them."""

    def new_graph(self) -> Graph: ...

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory and shape, owned by nobody: it may serve later parts of the capture, and
        other captures, as soon as the code that was captured has dropped `tensor`."""
