"""GgufFile: a GGUF file's metadata as plain values, and its tensors, mapped. Torch-free.

Our own reader, since starting from a GGUF must be quick: it takes a tenth of a second where the
gguf package, which keeps every string of the vocabulary as arrays of bytes, takes two. That package
is asked only for types that are not in `_TYPES`.

Layout: magic, version, counts; (key, type, value) pairs; (name, sizes, type, offset) of each
tensor; from the next multiple of the alignment on, the tensors.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nano.errors import CheckpointError

GGUF_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 1 counted in 32 bits
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# What reading nonsense raises, besides a struct.error.
_DAMAGE = (OSError, ValueError, IndexError, OverflowError, MemoryError, RecursionError)
# Kind of a metadata value -> how struct spells it.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufType:
    """A tensor type: `num_weights` neighbours in a row are stored in `num_bytes`."""

    type_id: int
    name: str
    num_weights: int
    num_bytes: int


_TYPES = {
    kind.type_id: kind
    for kind in (
        GgufType(0, "F32", 1, 4),
        GgufType(1, "F16", 1, 2),
        GgufType(30, "BF16", 1, 2),
        GgufType(2, "Q4_0", 32, 18),
        GgufType(3, "Q4_1", 32, 20),
        GgufType(6, "Q5_0", 32, 22),
        GgufType(8, "Q8_0", 32, 34),
        GgufType(12, "Q4_K", 256, 144),
        GgufType(14, "Q6_K", 256, 210),
    )
}
GGUF_TYPES = {kind.name: kind for kind in _TYPES.values()}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is row-major, as everywhere but in GGUF. data: [..., bytes of a row] uint8."""

    name: str
    type: GgufType
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """All of an opened file; the tensors stay on disk until they are used."""

    metadata: dict[str, Any]
    tensors: list[GgufTensor]

    @classmethod
    def open(cls, file: Path) -> "GgufFile":
        """Raises `CheckpointError` for what is damaged, or of another version or byte order."""
        try:
            with file.open("rb") as opened:
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            return cls(*_parse(_Cursor(data)))
        except CheckpointError:
            raise
        except (struct.error, *_DAMAGE) as error:
            raise CheckpointError(f"not a complete GGUF file: {error}") from error


class _Cursor:
    """A place in the mapped file that moves on as values are read."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.position = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def numbers(self, code: str, count: int) -> list[Any]:
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += struct.calcsize(f"<{count}{code}")
        return list(values)

    def string(self) -> str:
        start = self.position + 8
        end = start + self.number("Q")
        if end > len(self.data):
            raise ValueError(f"a string reaches to byte {end} of {len(self.data)}")
        self.position = end
        return self.data[start:end].decode("utf-8")

    def value(self) -> Any:
        return self._reader(self.number("I"))()

    def _reader(self, kind: int) -> Callable[[], Any]:
        if kind == _STRING:
            return self.string
        if kind == _ARRAY:
            return self._array
        if kind in _NUMBERS:
            return lambda: self.number(_NUMBERS[kind])
        raise ValueError(f"a metadata value of unknown kind {kind}")

    def _array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind], count)
        read = self._reader(kind)
        return [read() for _ in range(count)]


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], list[GgufTensor]]:
    if cursor.data[:4] != GGUF_MAGIC:
        raise ValueError(f"it begins with {cursor.data[:4]!r}")
    cursor.position = len(GGUF_MAGIC)
    version = cursor.number("I")
    if version not in _VERSIONS:
        # A big-endian file shows its version in the upper bytes.
        raise CheckpointError(f"its version is {version:#x}; nano reads {_VERSIONS}, little-endian")
    num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.string(): cursor.value() for _ in range(num_values)}
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    data = np.frombuffer(cursor.data, np.uint8)
    return metadata, [_tensor(data, start, *entry) for entry in entries]


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """(name, row-major shape, type, offset from where tensors begin)."""
    name, num_dims = cursor.string(), cursor.number("I")
    shape = tuple(reversed(cursor.numbers("Q", num_dims)))
    return name, shape, cursor.number("I"), cursor.number("Q")


def _tensor(
    data: np.ndarray, start: int, name: str, shape: tuple[int, ...], type_id: int, offset: int
) -> GgufTensor:
    kind = _TYPES.get(type_id) or _other_type(name, type_id)
    num_blocks, rest = divmod(shape[-1], kind.num_weights)
    if rest:
        raise ValueError(f"a row of {name} has {shape[-1]} weights, blocks have {kind.num_weights}")
    rows = (*shape[:-1], num_blocks * kind.num_bytes)
    begin, num_bytes = start + offset, int(np.prod(rows, dtype=object))
    if begin + num_bytes > len(data):
        raise ValueError(f"{name} reaches to byte {begin + num_bytes} of {len(data)}")
    return GgufTensor(name, kind, shape, data[begin : begin + num_bytes].reshape(rows))


def dequantize(tensor: GgufTensor) -> np.ndarray:
    """float32, of the tensor's shape. Raises `CheckpointError` for types that are no weights'."""
    if tensor.type.name == "F32":
        return tensor.data.view("<f4")
    gguf = _gguf_package(tensor.name, tensor.type.name)
    try:
        weight: np.ndarray = gguf.quants.dequantize(
            tensor.data, gguf.GGMLQuantizationType(tensor.type.type_id)
        )
    except NotImplementedError as error:
        raise CheckpointError(
            f"tensor {tensor.name} has type {tensor.type.name}, which cannot be dequantised"
        ) from error
    return weight.reshape(tensor.shape)


def _other_type(name: str, type_id: int) -> GgufType:
    gguf = _gguf_package(name, type_id)
    try:
        kind = gguf.GGMLQuantizationType(type_id)
    except ValueError as error:
        raise CheckpointError(f"tensor {name} has type {type_id}, which is not known") from error
    return GgufType(type_id, kind.name, *gguf.GGML_QUANT_SIZES[kind])


def _gguf_package(name: str, kind: str | int) -> Any:
    """Optional, since most files do without; and it is slow to import."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"tensor {name} has type {kind}, which needs the gguf package: "
            "pip install 'nano-engine[gguf]'"
        ) from error
    return gguf
