"""A model without its weights: enough to trace and compile it, in another process.

The module tree is pickled with every tensor replaced by its shape, strides and dtype, and comes
back with tensors that have these and no memory. Whatever a model is made of travels so: layers,
packed weights of any format, the kernels it computes with; there is no list of classes to keep in
step.
"""

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_Shape = tuple[int, bool, torch.dtype, tuple[int, ...], tuple[int, ...]]


def dump_skeleton(model: nn.Module) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(model)
    return file.getvalue()


def load_skeleton(data: bytes, device: str = "cpu") -> nn.Module:
    """The model that was dumped, on `device`, to be traced and never run: it has no weights."""
    model = _Unpickler(io.BytesIO(data), device).load()
    assert isinstance(model, nn.Module)
    return model


def describe(model: nn.Module) -> dict[str, Any]:
    """All that a trace can read of a model but its weights, as JSON: the class and plain attributes
    of every module, and the kind of every tensor."""
    modules = {
        path: [
            type(module).__qualname__,
            {
                name: _spell(value)
                for name, value in sorted(vars(module).items())
                if name not in _OF_EVERY_MODULE
            },
        ]
        for path, module in model.named_modules()
    }
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    kinds = {name: [str(t.dtype), list(t.shape), list(t.stride())] for name, t in tensors.items()}
    return {"modules": modules, "tensors": kinds}


def _spell(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_spell(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): _spell(entry) for key, entry in value.items()}
    if isinstance(value, (torch.dtype, slice)):
        return str(value)
    return type(value).__qualname__


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._indices: dict[int, int] = {}  # of tensors: one that is used twice comes back as one

    def persistent_id(self, value: Any) -> _Shape | None:
        if not isinstance(value, Tensor):
            return None
        index = self._indices.setdefault(id(value), len(self._indices))
        is_parameter = isinstance(value, nn.Parameter)
        return index, is_parameter, value.dtype, tuple(value.shape), tuple(value.stride())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: str):
        super().__init__(file)
        self._device = device
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, shape: _Shape) -> Tensor:
        index, is_parameter, dtype, size, stride = shape
        if index not in self._tensors:
            tensor = torch.empty_strided(size, stride, dtype=dtype, device=self._device)
            tensor.untyped_storage().resize_(0)  # on a GPU untouched memory is taken all the same
            self._tensors[index] = (
                nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            )
        return self._tensors[index]
