"""Compilations: what is compiled in this process while one looks: graphs by Dynamo, kernels by
Triton. A step in service should compile nothing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any


@contextmanager
def compilations(is_gpu: bool) -> Iterator[list[str]]:
    """The names of what was compiled in the block, complete at its end."""
    compiled: list[str] = []
    num_graphs = _num_dynamo_graphs()
    with _triton_kernels(compiled) if is_gpu and find_spec("triton") else _nobody():
        yield compiled
    compiled += ["a graph by Dynamo"] * (_num_dynamo_graphs() - num_graphs)


@contextmanager
def _triton_kernels(compiled: list[str]) -> Iterator[None]:
    """Appends each kernel that is specialised anew, from its disk cache or not."""
    from triton import knobs

    def note(*, repr: str, **_: Any) -> None:
        compiled.append(repr)

    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = note
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = before


@contextmanager
def _nobody() -> Iterator[None]:
    yield


def _num_dynamo_graphs() -> int:
    """0 if nobody has imported it: that alone takes seconds."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
