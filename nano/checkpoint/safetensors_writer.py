"""Write a safetensors file tensor by tensor, so that only one is ever in memory. Torch-free.

The format is a length, a JSON table of contents, and the tensors' bytes; with every shape known
beforehand the table can be written first.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

_FLOAT32_BYTES = 4
_ALIGNMENT = 8  # of the first tensor, which lets readers map the file


def write_float32(
    file: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[np.ndarray]
) -> None:
    """Write `tensors`, float32 and in the order of `shapes`, which names them."""
    contents: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _FLOAT32_BYTES * math.prod(shape)
        contents[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(contents, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little"))
        out.write(header)
        for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
            assert tensor.shape == shape, f"{name}: {tensor.shape} is not {shape}"
            np.ascontiguousarray(tensor, dtype="<f4").tofile(out)
