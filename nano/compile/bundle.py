"""A piece as Inductor itself keeps it: what a GPU's pieces are stored as.

There Inductor writes Triton, which its own runtime assembles and launches: the text alone, as
`inductor.py` keeps it for a CPU, would be half of it. A bundle is all of a piece in one file:
Python, assembled kernels, how to launch them. Nothing here knows of any device.

Loading imports Inductor, whose runtime the pieces need, and unpacks files into a folder of
Inductor's; it traces nothing, and compiles nothing that still lies there from the build.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nano.compile import inductor
from nano.compile.piecewise import Piece

SCRATCH = "inductor"  # the folder of Inductor's, beside the bundles
_OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "graph_partition": False,
    # What is chosen by timing may be chosen otherwise next time, and sums in another order.
    "deterministic": True,
    "batch_invariant": True,  # nor does the choice look at the number of tokens
}

PieceFn = Callable[..., Sequence[Tensor]]


def compile_bundle(piece: Piece, path: Path) -> None:
    """Compile `piece` for every number of tokens, on the device of its examples, into `path`."""
    from torch._inductor import config, standalone_compile

    options = {name: value for name, value in _OPTIONS.items() if hasattr(config, name)}  # of 2.13
    compiled = standalone_compile(
        piece.graph,
        piece.examples,
        dynamic_shapes="from_graph",
        options={"config_patches": options},
        aot=True,
    )
    compiled.save(path=str(path))


def load_bundles(paths: Sequence[Path]) -> Iterator[PieceFn]:
    """The pieces in files of one folder. Raises whatever Inductor does if they are damaged."""
    inductor.prepare(_writable(paths[0].parent / SCRATCH))
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    for path in paths:
        yield AOTCompiledArtifact.load(path=str(path))


def _writable(scratch: Path) -> Path:
    """Inductor locks and unpacks where it reads: elsewhere, if it may not do so here."""
    if os.access(scratch, os.W_OK):
        return scratch
    return Path(tempfile.mkdtemp(prefix="nano-inductor-"))
