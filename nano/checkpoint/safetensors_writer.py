"""Write a safetensors file tensor by tensor, so that only one is ever in memory. Torch-free.

The format is a length, a JSON table of contents, and the tensors' bytes; with every shape known
beforehand the table can be written first.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_ALIGNMENT = 8  # of the first tensor, which lets readers map the file

FLOAT_TYPES = ("F32", "F16", "BF16")
# numpy has no bfloat16: such a tensor comes as the integers that its bytes spell.
_NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in the table of contents."""

    dtype: str  # one of `FLOAT_TYPES`, or "U8"
    shape: tuple[int, ...]

    @property
    def numpy_type(self) -> np.dtype:
        return np.dtype(_NUMPY_TYPES[self.dtype])

    @property
    def num_bytes(self) -> int:
        return self.numpy_type.itemsize * math.prod(self.shape)


def write_safetensors(
    file: Path, entries: Mapping[str, TensorEntry], tensors: Iterable[np.ndarray]
) -> None:
    """Write `tensors`, in the order of `entries`, which names them."""
    contents: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        end = offset + entry.num_bytes
        contents[name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    header = json.dumps(contents, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little"))
        out.write(header)
        for (name, entry), tensor in zip(entries.items(), tensors, strict=True):
            assert tensor.shape == entry.shape, f"{name}: {tensor.shape} is not {entry.shape}"
            assert tensor.dtype == entry.numpy_type, f"{name} is {tensor.dtype}"
            np.ascontiguousarray(tensor).tofile(out)
