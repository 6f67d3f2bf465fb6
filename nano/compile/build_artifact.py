"""build_artifact: trace, generate, compile, write. What only the compiling process runs."""

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from nano.compile import inductor
from nano.compile.artifact import (
    KERNELS,
    KERNELS_SOURCE,
    PIECES,
    CompileReport,
    Manifest,
    bundle_name,
    digest_of,
)
from nano.compile.bundle import SCRATCH, compile_bundle
from nano.compile.inductor import Kernel, PieceCode
from nano.compile.kernels import compile_module, module_source, unique_names
from nano.compile.piecewise import Piece, trace
from nano.compile.request import Form, InputKinds

_HEADER = '''"""A model's forward in compiled pieces, as torch's compiler wrote them. Generated."""

'''


@dataclass(frozen=True, slots=True)
class _Built:
    """What a form of keeping pieces has made of them, beside its files."""

    piece_seconds: list[float]
    sources: list[str] = field(default_factory=list)  # for pieces.py
    ops: dict[str, str] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)
    compiler_seconds: float = 0.0


def build_artifact(
    model: nn.Module,
    inputs: InputKinds,
    split_ops: Sequence[str],
    factors: dict[str, str],
    folder: Path,
    form: Form = "source",
) -> Manifest:
    """Compile the forward of `model`, called with `inputs`, into the empty `folder`. It is cut at
    `split_ops`.

    Nothing of the model is computed, so its weights may be uninitialised. Raises `CompileFailed` or
    `UnexpectedCode`; Inductor may raise anything.
    """
    scratch = folder / SCRATCH
    inductor.prepare(scratch)
    started = time.perf_counter()
    traced = trace(model, inputs, split_ops)
    trace_seconds = time.perf_counter() - started
    if form == "bundle":
        built = _bundles(traced.pieces, folder)
        # Triton's own cache knows its files by where they were; the bundles have all of them.
        shutil.rmtree(scratch / "triton", ignore_errors=True)
    else:
        built = _sources(traced.pieces, folder)
        shutil.rmtree(scratch, ignore_errors=True)
    (folder / PIECES).write_text(_HEADER + "\n\n".join([*built.sources, traced.source]))
    manifest = Manifest(
        factors=factors,
        form=form,
        weights=traced.weights,
        ops=built.ops,
        kernels=built.kernels,
        report=CompileReport(
            num_calls=traced.num_calls,
            num_split_calls=traced.num_split_calls,
            uses=[piece.num_uses for piece in traced.pieces],
            trace_seconds=trace_seconds,
            piece_seconds=built.piece_seconds,
            compiler_seconds=built.compiler_seconds,
        ),
        # Inductor goes on to write into its folder.
        digests={file.name: digest_of(file) for file in sorted(folder.iterdir()) if file.is_file()},
    )
    manifest.write(folder)
    return manifest


def _bundles(pieces: Sequence[Piece], folder: Path) -> _Built:
    seconds = []
    for index, piece in enumerate(pieces):
        started = time.perf_counter()
        compile_bundle(piece, folder / bundle_name(index))
        seconds.append(time.perf_counter() - started)
    return _Built(seconds)


def _sources(pieces: Sequence[Piece], folder: Path) -> _Built:
    codes: list[PieceCode] = []
    seconds = []
    for index, piece in enumerate(pieces):
        started = time.perf_counter()
        codes.append(inductor.generate(piece, index))
        seconds.append(time.perf_counter() - started)
    names = unique_names(kernel for code in codes for kernel in code.kernels)
    (folder / KERNELS_SOURCE).write_text(module_source(names))
    started = time.perf_counter()
    compile_module(folder / KERNELS_SOURCE, folder / KERNELS)
    return _Built(
        piece_seconds=seconds,
        sources=[_with_names(code, names) for code in codes],
        ops={name: op for code in codes for name, op in code.ops.items()},
        kernels=list(names.values()),
        compiler_seconds=time.perf_counter() - started,
    )


def _with_names(code: PieceCode, names: Mapping[Kernel, str]) -> str:
    """A piece that calls its kernels as the module names them."""
    source = code.source
    for kernel in code.kernels:
        source = re.sub(rf"\b{kernel.name}\b", names[kernel], source)
    return source
