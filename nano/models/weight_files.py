"""WeightFiles: which safetensors file of a checkpoint holds which tensor."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nano.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True)
class WeightFiles:
    """The files to read and the tensor names to take from each, in order.

    With an index only the files it lists count; other .safetensors files beside them are
    ignored. Without one, model.safetensors is taken alone if it is there, else every
    .safetensors file, and a name that occurs twice is an error.
    """

    names_by_file: dict[Path, list[str]]

    @classmethod
    def find(cls, folder: Path) -> "WeightFiles":
        """Raises `CheckpointError` for a missing or damaged file, or an ambiguous folder."""
        index = folder / INDEX_FILE
        if index.exists():
            return cls(_read_index(index))
        single = folder / SINGLE_FILE
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} holds no .safetensors file, the one format nano loads")
        names_by_file = {file: tensor_names(file) for file in files}
        _refuse_duplicates(names_by_file)
        return cls(names_by_file)

    @property
    def names(self) -> dict[str, Path]:
        """Every tensor name and its file."""
        return {name: file for file, names in self.names_by_file.items() for name in names}


def tensor_names(file: Path) -> list[str]:
    with _open(file) as tensors:
        return sorted(tensors.keys())


class TensorReader:
    """Reads tensors by name, on the CPU, as views of the mapped files, which stay open."""

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}

    def read(self, file: Path, name: str) -> Tensor:
        if file not in self._opened:
            self._opened[file] = _open(file)
        tensor: Tensor = self._opened[file].get_tensor(name)
        return tensor


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist") from None
    except (OSError, SafetensorError) as error:
        # A truncated file is found here: the header records the size of the rest.
        raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from error


def _read_index(index: Path) -> dict[Path, list[str]]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        items = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} holds no readable weight_map: {error!r}") from error
    names_by_file: dict[Path, list[str]] = {}
    for name, file_name in sorted(items, key=lambda item: item[1]):
        if Path(file_name).name != file_name:
            raise CheckpointError(f"{index} places {name} in {file_name!r}, which is not beside it")
        names_by_file.setdefault(index.parent / file_name, []).append(name)
    missing = [file.name for file in names_by_file if not file.exists()]
    if missing:
        raise CheckpointError(f"{index} lists {', '.join(missing)}, which does not exist")
    for file, names in names_by_file.items():
        absent = set(names) - set(tensor_names(file))
        if absent:
            raise CheckpointError(f"{file} lacks {min(absent)}, which {index.name} places there")
    return names_by_file


def _refuse_duplicates(names_by_file: dict[Path, list[str]]) -> None:
    file_of: dict[str, Path] = {}
    for file, names in names_by_file.items():
        for name in names:
            if name in file_of:
                raise CheckpointError(
                    f"{name} is in both {file_of[name]} and {file}, and there is no {INDEX_FILE} "
                    "to say which counts"
                )
            file_of[name] = file
