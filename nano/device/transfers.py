"""Transfers: arrays of the host to a device, and a step's results back. Nobody waits but `wait`.

Where host and device are one, nothing moves.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class HostCopy(Protocol):
    """Tensors of the device on their way to the host."""

    def wait(self) -> list[np.ndarray]:
        """Their values, each of its tensor's shape and dtype; the same arrays in every call.

        Until the first call nobody may write to the tensors. Arrays may share their memory.
        """


class Transfers(Protocol):
    """How one device and its host exchange values."""

    @property
    def torch_device(self) -> torch.device: ...

    def to_device(self, array: np.ndarray) -> Tensor:
        """The array as a tensor there. The caller rewrites it only in the next step."""

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        """One copy of each, queued behind what computes them. Of dtypes that numpy has."""


class HostTransfers:
    """For main memory: everything is where it should be."""

    torch_device = torch.device("cpu")

    def to_device(self, array: np.ndarray) -> Tensor:
        """The array as a tensor. Shares memory: the caller rewrites it only in the next step."""
        return torch.from_numpy(array)

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        return _AtHand([tensor.numpy() for tensor in tensors])


class _AtHand:
    def __init__(self, arrays: list[np.ndarray]):
        self._arrays = arrays

    def wait(self) -> list[np.ndarray]:
        return self._arrays
