"""A device on the CPU that notices when the host looks at its tensors.

On a GPU every such look waits for all that is queued; `torch.cuda.set_sync_debug_mode("error")`
finds it there. Here `DeviceOfItsOwn` marks what it is given, `NoHostReads` hands the mark on to all
that is computed from it, and refuses whatever would wait:

- numbers: `tolist`, `item`, `numpy`, `cpu`, `if tensor`, `int(tensor)`, numpy's own conversions;
- operators whose output's shape depends on values: `nonzero`, boolean indices, `unique`;
- tensors of the host beside those of the device: such a copy would come from unpinned memory.

`Transfers.to_host` alone is allowed, and its waits are counted. Inside the guard what torch makes
(`empty`, `arange`) is the device's, and what comes from numpy or Python's lists is the host's.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nano.device import CpuDevice

_METHODS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
_OPERATORS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "multinomial",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_numpy = Tensor.numpy


class HostRead(AssertionError):
    """The host has looked at the device, or given it something by a slow way."""


def mark(tensors: Iterable[Tensor]) -> None:
    """From now on these are the device's."""
    for tensor in tensors:
        tensor.is_on_device = True  # type: ignore[attr-defined]


def is_marked(tensor: Tensor) -> bool:
    return getattr(tensor, "is_on_device", False)


class DeviceOfItsOwn(CpuDevice):
    """The CPU, as if its memory were another's. Counts what is read of it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_copies = self.num_waits = 0

    def to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array.copy())
        mark([tensor])
        return tensor

    def to_host(self, tensors: Sequence[Tensor]) -> "Copy":
        self.num_copies += 1
        return Copy(self, [_numpy(tensor).copy() for tensor in tensors])


class Copy:
    def __init__(self, device: DeviceOfItsOwn, arrays: list[np.ndarray]):
        self._device = device
        self._arrays = arrays

    def wait(self) -> list[np.ndarray]:
        self._device.num_waits += 1
        return self._arrays


class NoHostReads(TorchDispatchMode):
    """Raises `HostRead` where marked tensors are read. A context manager."""

    def __enter__(self) -> "NoHostReads":
        self._patches = ExitStack()
        for name in _METHODS:
            self._patches.enter_context(patch.object(Tensor, name, _refusing(name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        inputs = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        of_device = [tensor for tensor in inputs if is_marked(tensor)]
        space, _, name = function._schema.name.partition("::")
        if of_device and space == "aten":
            if name in _OPERATORS:
                raise HostRead(f"{name} of a tensor of the device")
            if name in _INDEXING and any(tensor.dtype == torch.bool for tensor in inputs[1:]):
                raise HostRead(f"{name} by a boolean tensor: the host must know how many are True")
            if any(tensor.dim() > 0 and not is_marked(tensor) for tensor in inputs):
                raise HostRead(f"{name} of tensors of the host and of the device")
        results = function(*args, **kwargs or {})
        if of_device or not inputs:
            mark(leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
        return results


def _refusing(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_marked(tensor):
            raise HostRead(f"{name} of a tensor of the device")
        return method(tensor, *args, **kwargs)

    return read
