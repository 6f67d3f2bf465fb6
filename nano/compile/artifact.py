"""Artifact: a folder with compiled pieces, and the model's forward made of it.

    pieces.py      run, which calls piece_0, piece_1, ... in turn
    manifest.json  factors, weights, what compiling did, and a digest of every file

The pieces are kept in one of two forms (`request.Form`):

    source         in pieces.py as Inductor wrote them, with their C++ kernels in kernels.so
    bundle         piece_0.bundle, ... as Inductor keeps them, and its folder inductor/

Loading sources takes a few dozen milliseconds, imports neither Dynamo nor Inductor, and can be
spread over several steps of the engine. The generated code runs under the few names of `RUNTIME`.
Bundles take the seconds of an import of Inductor.
"""

import hashlib
import importlib.machinery
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nano.compile.request import Form
from nano.compile.store import MANIFEST
from nano.errors import NanoError

ForwardFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # as `Decoder.INPUTS`

PIECES, KERNELS_SOURCE, KERNELS = "pieces.py", "kernels.cpp", "kernels.so"
MODULE = "kernels"  # as the library calls itself
_guards: Any = torch._C._dynamo.guards  # C++, whatever its name says
RUNTIME: dict[str, Any] = {
    "torch": torch,
    "empty_strided_cpu": _guards._empty_strided_cpu,
    "reinterpret_tensor": _guards._reinterpret_tensor,
    "extern_kernels": torch,  # torch.mm(..., out=) and its like
}


class BadArtifact(NanoError):
    """A stored artifact is damaged, or does not compute what the model does."""


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What one compilation did."""

    num_calls: int  # of pieces, in a forward pass
    num_split_calls: int  # of split ops between them
    uses: list[int]  # of each distinct piece
    trace_seconds: float
    piece_seconds: list[float]  # Inductor
    compiler_seconds: float  # C++


@dataclass(frozen=True, slots=True)
class Manifest:
    """What manifest.json says."""

    factors: dict[str, str]
    form: Form
    weights: list[str]  # names in the model; number i is the global w<i>
    ops: dict[str, str]  # global -> "namespace::op.overload"; of sources, as are
    kernels: list[str]
    report: CompileReport
    digests: dict[str, str]  # of the other files

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises `BadArtifact` unless everything in `folder` is as it was written."""
        try:
            fields = json.loads((folder / MANIFEST).read_bytes())
            manifest = cls(**(fields | {"report": CompileReport(**fields["report"])}))
            for name, digest in manifest.digests.items():
                if digest_of(folder / name) != digest:
                    raise BadArtifact(f"{name} is damaged")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadArtifact(f"{type(error).__name__}: {error}") from error
        return manifest

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1))


def digest_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def load(
    folder: Path, model: nn.Module, split_ops: Mapping[str, Callable[..., None]]
) -> Iterator[ForwardFn | None]:
    """The forward of `model` that `folder` holds, after some yields of None between parts of the
    work. Raises `BadArtifact`."""
    manifest = Manifest.read(folder)
    yield None
    try:
        names = dict(RUNTIME)
        if manifest.form == "bundle":
            names |= _load_bundles(folder, len(manifest.report.uses))
        else:
            kernels = _load_kernels(folder / KERNELS)
            names |= {name: getattr(kernels, name) for name in manifest.kernels}
            names |= {name: _op(op) for name, op in manifest.ops.items()}
        yield None
        code = compile((folder / PIECES).read_text(), folder / PIECES, "exec")
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        names |= {f"w{i}": tensors[name] for i, name in enumerate(manifest.weights)}
        names |= {split_op_name(op): function for op, function in split_ops.items()}
        exec(code, names)
    except (OSError, ImportError, ValueError, SyntaxError, LookupError, AttributeError) as error:
        raise BadArtifact(f"{type(error).__name__}: {error}") from error
    run: ForwardFn = names["run"]
    yield run


def sources(folder: Path) -> list[Path]:
    """What there is to be read of an artifact."""
    written = [folder / PIECES, folder / KERNELS_SOURCE]
    return [file for file in written if file.exists()] + sorted(folder.rglob("*/*.py"))


def split_op_name(op: str) -> str:
    """The global under which `run` finds a split op "namespace::op"."""
    return op.replace("::", "_")


def bundle_name(index: int) -> str:
    """The file of piece number `index`."""
    return f"piece_{index}.bundle"


def _load_bundles(folder: Path, num_pieces: int) -> dict[str, Any]:
    """Name -> piece. Raises `BadArtifact`."""
    from nano.compile.bundle import load_bundles  # Inductor: only where pieces are bundles

    paths = [folder / bundle_name(index) for index in range(num_pieces)]
    try:
        return {f"piece_{index}": piece for index, piece in enumerate(load_bundles(paths))}
    except Exception as error:  # unpickling may raise anything
        raise BadArtifact(f"{type(error).__name__}: {error}") from error


def _load_kernels(library: Path) -> Any:
    """The extension module in `library`, ready to be called with tensors."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_loader(MODULE, loader)
    assert spec is not None
    module: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.bind(_guards._torchinductor_pyobject_tensor_data_ptr)
    return module


def _op(name: str) -> Callable[..., Any]:
    """The overload called "namespace::op.overload", without the Python around it."""
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    bound: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), op), overload)._op
    return bound
