"""CompileRequest: what to compile, and the named factors that its pieces depend on. Torch-free.

Equal factors, equal pieces: their digest is the key under which pieces are stored, and they are
kept beside them, so that a miss can be explained. No path, port, seed or time is among them: a
start with another of these finds what the first one made.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Literal

from nano.native.build import cpu_flags, cpu_name

_NANO = Path(__file__).parent.parent
# What the trace reads, what writes the code, and the schemas of the ops that it calls.
_SOURCES = ("attention/op.py", "compile", "layers", "models", "quant")
_LONG = 60  # characters; longer values are named by their digest

# How pieces are kept: as code of Inductor's that our own C++ flags compile and that runs without
# Inductor, bit by bit as the eager model; or whole, as Inductor keeps them, for any device.
Form = Literal["source", "bundle"]

# By name: the dtype of an input of one dimension, and what its size is called.
InputKinds = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class CompileRequest:
    """A model without its weights (see skeleton.py), and how it is called."""

    description: dict[str, Any]  # all that pieces depend on, as JSON
    inputs: InputKinds  # parameters of `forward`, in order
    split_ops: tuple[str, ...]  # where the graph is cut: "namespace::op"
    skeleton: bytes
    device: str = "cpu"  # where it computes, in torch's words; the index is in generated code
    device_traits: dict[str, str] = field(default_factory=dict)  # of one that is no CPU

    @property
    def form(self) -> Form:
        """How its pieces are kept: here alone devices differ."""
        return "source" if self.device == "cpu" else "bundle"

    @cached_property
    def factors(self) -> dict[str, str]:
        """The machine's software and processor, then the model."""
        if self.device == "cpu":
            traits = {"cpu": _named(cpu_name()), "cpu_flags": " ".join(cpu_flags())}
        else:
            traits = {"device": self.device, **self.device_traits}
        factors = {
            "torch": version("torch"),
            "python": str(sys.implementation.cache_tag),
            "nano": _sources_digest(),
            **traits,
            "inputs": _spell(self.inputs),
            "split_ops": _spell(self.split_ops),
        }
        return factors | {name: _spell(value) for name, value in self.description.items()}

    @cached_property
    def key(self) -> str:
        return _digest(json.dumps(self.factors, sort_keys=True))

    def write(self, file: BinaryIO) -> None:
        head = {
            "description": self.description,
            "inputs": self.inputs,
            "split_ops": self.split_ops,
            "device": self.device,
            "device_traits": self.device_traits,
        }
        file.write(json.dumps(head).encode() + b"\n" + self.skeleton)

    @classmethod
    def read(cls, file: BinaryIO) -> "CompileRequest":
        head = json.loads(file.readline())
        split_ops = tuple(head.pop("split_ops"))
        return cls(**head, split_ops=split_ops, skeleton=file.read())


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for place in _SOURCES:
        path = _NANO / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"{file.relative_to(_NANO)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def _named(cpu: str) -> str:
    """The first line of a CPU's description, which names it, and a digest of all of it."""
    return f"{cpu.partition(chr(10))[0].rpartition(':')[2].strip()} {_digest(cpu)[:8]}"


def _spell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= _LONG else _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
