"""build_artifact: trace, generate, compile, write. What only the compiling process runs."""

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from nano.compile import inductor
from nano.compile.artifact import (
    KERNELS,
    KERNELS_SOURCE,
    PIECES,
    CompileReport,
    Manifest,
    digest_of,
)
from nano.compile.inductor import Kernel, PieceCode
from nano.compile.kernels import compile_module, module_source, unique_names
from nano.compile.piecewise import trace

_HEADER = '''"""A model's forward in compiled pieces, as torch's compiler wrote them. Generated."""

'''


def build_artifact(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    split_ops: Sequence[str],
    factors: dict[str, str],
    folder: Path,
) -> Manifest:
    """Compile `model.forward(**inputs)`, cut at `split_ops`, into the empty `folder`.

    Nothing of the model is computed, so its weights may be uninitialised. Raises `CompileFailed` or
    `UnexpectedCode`.
    """
    scratch = folder / "inductor"
    inductor.prepare(scratch)
    started = time.perf_counter()
    traced = trace(model, inputs, split_ops)
    trace_seconds = time.perf_counter() - started

    codes: list[PieceCode] = []
    piece_seconds = []
    for index, piece in enumerate(traced.pieces):
        started = time.perf_counter()
        codes.append(inductor.generate(piece, index))
        piece_seconds.append(time.perf_counter() - started)

    names = unique_names(kernel for code in codes for kernel in code.kernels)
    sources = [_with_names(code, names) for code in codes]
    (folder / PIECES).write_text(_HEADER + "\n\n".join([*sources, traced.source]))
    (folder / KERNELS_SOURCE).write_text(module_source(names))
    started = time.perf_counter()
    compile_module(folder / KERNELS_SOURCE, folder / KERNELS)
    report = CompileReport(
        num_calls=traced.num_calls,
        num_split_calls=traced.num_split_calls,
        uses=[piece.num_uses for piece in traced.pieces],
        trace_seconds=trace_seconds,
        piece_seconds=piece_seconds,
        compiler_seconds=time.perf_counter() - started,
    )
    shutil.rmtree(scratch, ignore_errors=True)
    manifest = Manifest(
        factors=factors,
        weights=traced.weights,
        ops={name: op for code in codes for name, op in code.ops.items()},
        kernels=list(names.values()),
        report=report,
        digests={file.name: digest_of(file) for file in sorted(folder.iterdir())},
    )
    manifest.write(folder)
    return manifest


def _with_names(code: PieceCode, names: Mapping[Kernel, str]) -> str:
    """A piece that calls its kernels as the module names them."""
    source = code.source
    for kernel in code.kernels:
        source = re.sub(rf"\b{kernel.name}\b", names[kernel], source)
    return source
