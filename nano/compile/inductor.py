"""Inductor as a code generator: a piece in, Python and C++ source out.

Inductor turns a graph into a Python function `call(args)` that allocates buffers and calls C++
kernels and opaque ops. Here only its text is taken: the body becomes `piece_<i>(...)`, and the
kernels of all pieces go into one C++ file, which our own flags compile (`kernels.py`). Running it
needs nothing of Inductor.

Options: kernels without threads, since all heavy work is in native ops on our own pool; scalar
loops, which the C++ compiler vectorises, since Inductor's own vector code costs several times as
long to compile. What has another shape than this file expects is refused: torch is pinned, and
named in the key of what is stored.
"""

import ast
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano.compile.artifact import RUNTIME
from nano.compile.piecewise import Piece
from nano.errors import NanoError

_BUILTINS = {"RuntimeError", "min", "max", "int", "float"}
_OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "graph_partition": False,
    "cpp.threads": 1,
    "cpp.simdlen": 1,
    "cpp.vec_isa_ok": True,  # no vector code is made, so none needs a test
}
_OP_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


class UnexpectedCode(NanoError):
    """Inductor wrote something that this version of nano does not know how to store."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One C++ function that Inductor wrote."""

    name: str
    argument_types: tuple[str, ...]
    source: str  # defines `kernel`


@dataclass(frozen=True, slots=True)
class PieceCode:
    """What Inductor made of one piece."""

    source: str  # def piece_<i>(...)
    kernels: tuple[Kernel, ...]
    ops: dict[str, str]  # global of the source -> "namespace::op.overload"


def prepare(scratch: Path) -> None:
    """Let Inductor keep its own files in `scratch`, and use one process. Before it is imported."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(scratch)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def generate(piece: Piece, index: int) -> PieceCode:
    """Code for piece number `index`, for every number of tokens. Raises `UnexpectedCode`."""
    from torch._inductor import standalone_compile

    with _code_only() as codes:
        standalone_compile(
            piece.graph,
            piece.examples,
            dynamic_shapes="from_graph",
            options={"config_patches": _OPTIONS},
        )
    if len(codes) != 1:
        raise UnexpectedCode(f"Inductor made {len(codes)} functions of piece {index}")
    return extract(codes[0], f"piece_{index}", num_inputs=len(piece.examples))


@contextmanager
def _code_only() -> Iterator[list[str]]:
    """Collect what Inductor writes, and let it compile no kernel."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    with (
        _replaced(GraphLowering, "save_output_code", codes.append),
        _replaced(AsyncCompile, "cpp_pybinding", lambda *args: None),
    ):
        yield codes


@contextmanager
def _replaced(owner: type, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def extract(code: str, name: str, num_inputs: int) -> PieceCode:
    """The parts of a module that Inductor wrote. Its function will be called `name`."""
    module = ast.parse(code)
    kernels = {}
    for statement in module.body:
        kernel = _kernel(statement)
        if kernel is not None:
            kernels[kernel.name] = kernel
    functions = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "call"]
    if len(functions) != 1:
        raise UnexpectedCode(f"{name}: Inductor wrote {len(functions)} functions named call")
    parameters, body = _unpacked(functions[0], code, name)
    if len(parameters) != num_inputs:
        raise UnexpectedCode(f"{name}: {len(parameters)} parameters for {num_inputs} inputs")
    ops: dict[str, str] = {}

    def bind(match: re.Match[str]) -> str:
        namespace, op, overload = match.groups()
        ops[f"op_{namespace}_{op}_{overload}"] = f"{namespace}::{op}.{overload}"
        return f"op_{namespace}_{op}_{overload}("

    source = f"def {name}({', '.join(parameters)}):\n{_OP_CALL.sub(bind, body)}\n"
    _check_names(source, {*kernels, *ops, *RUNTIME, *_BUILTINS}, name)
    return PieceCode(source, tuple(kernels.values()), ops)


def _kernel(statement: ast.stmt) -> Kernel | None:
    """`name = async_compile.cpp_pybinding([types], source)`, if that is what it says."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="async_compile"), attr=maker), args=args
            ),
        ):
            if maker != "cpp_pybinding":
                raise UnexpectedCode(f"kernel {name} is made by {maker}")
            types, source = map(ast.literal_eval, args)
            return Kernel(name, tuple(types), source)
    return None


def _unpacked(function: ast.FunctionDef, code: str, name: str) -> tuple[list[str], str]:
    """(parameters, lines after `a, b = args; args.clear()`) of `def call(args)`."""
    first, second, *rest = function.body
    match first, ast.unparse(second):
        case ast.Assign(
            targets=[ast.Tuple(elts=elements)], value=ast.Name(id="args")
        ), "args.clear()":
            parameters = [ast.unparse(element) for element in elements]
        case _:
            raise UnexpectedCode(f"{name}: call does not begin by unpacking its arguments")
    if not isinstance(rest[-1], ast.Return):
        raise UnexpectedCode(f"{name}: call does not end in a return")
    return parameters, "\n".join(code.splitlines()[rest[0].lineno - 1 : rest[-1].end_lineno])


def _check_names(source: str, known: set[str], name: str) -> None:
    """Refuse a function that reads a global we do not provide."""
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    known = known | {argument.arg for argument in function.args.args}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    unknown = {node.id for node in names} - known
    if unknown:
        raise UnexpectedCode(f"{name}: calls {', '.join(sorted(unknown))}")
