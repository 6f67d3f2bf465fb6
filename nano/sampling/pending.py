"""Pending: a result of a step whose numbers are still on the device.

A step queues all that it wants to know, joins it (`all_of`), and waits once (`Pending.read`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from nano.device import Transfers

T = TypeVar("T")
U = TypeVar("U")


@dataclass(slots=True)
class Pending(Generic[T]):
    """What `make` will make on the host of the values of `tensors`."""

    tensors: list[Tensor]
    make: Callable[[list[np.ndarray]], T]

    def then(self, function: Callable[[T], U]) -> "Pending[U]":
        """`function` of the result, once it is there."""
        return Pending(self.tensors, lambda arrays: function(self.make(arrays)))

    def read(self, transfers: Transfers) -> T:
        """The result. Waits for the device."""
        return self.make(transfers.to_host(self.tensors).wait())


def all_of(parts: Sequence[Pending[Any]]) -> Pending[list[Any]]:
    """Several results as one, in their order."""

    def make(arrays: list[np.ndarray]) -> list[Any]:
        rest = iter(arrays)
        return [part.make([next(rest) for _ in part.tensors]) for part in parts]

    return Pending([tensor for part in parts for tensor in part.tensors], make)
