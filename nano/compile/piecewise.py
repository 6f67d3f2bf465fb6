"""Piecewise compilation: a graph cut at named ops, each distinct piece compiled once.

Dynamo hands over one FX graph of the whole model, parameters and the symbolic number of tokens as
inputs. It is split at every op of `split_ops` (attention), which stays an ordinary call between two
compiled pieces:

    piece 0 | attention 0 | piece 1 | attention 1 | piece 1 again ... | last piece

Layers are alike, so of some sixty pieces three are distinct, whatever the depth. A generated
function calls them in turn; nothing of FX runs in a step.
"""

import hashlib
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

Piece = Callable[..., tuple[Any, ...]]
CompilePiece = Callable[[fx.GraphModule, list[Any]], Piece]


@dataclass(slots=True)
class CompileReport:
    """What one compilation did."""

    num_pieces: int = 0  # compiled regions in the stitched function
    num_distinct: int = 0  # of those, compiled
    num_split_calls: int = 0  # calls of split ops between them
    seconds: float = 0.0
    source: str = ""  # of the stitched function
    piece_seconds: list[float] = field(default_factory=list)


class PiecewiseBackend:
    """A Dynamo backend. Called once; a second graph would be a retrace, which is an error."""

    def __init__(self, split_ops: Sequence[str], compile_piece: CompilePiece) -> None:
        self.report: CompileReport | None = None
        self._split_ops = frozenset(split_ops)
        self._compile_piece = compile_piece

    def __call__(self, graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        if self.report is not None:
            raise RuntimeError("the model was traced a second time; it must be compiled once")
        self.report = report = CompileReport()
        started = time.perf_counter()
        partition, split_ids = self._partition(graph)
        whole = split_module(
            graph,
            None,  # type: ignore[arg-type]  # only its place in old torchs
            lambda node: partition[node],
            keep_original_order=True,  # attention mutates its output
            tuple_return=True,
        )
        pieces: dict[str, Piece] = {}
        distinct: dict[str, Piece] = {}
        for name, piece in whole.named_children():
            assert isinstance(piece, fx.GraphModule)
            if _partition_id(name) in split_ids:
                report.num_split_calls += 1
                continue
            key = structural_key(piece)
            if key not in distinct:
                piece_started = time.perf_counter()
                examples = [
                    n.meta["example_value"] for n in piece.graph.find_nodes(op="placeholder")
                ]
                distinct[key] = self._compile_piece(piece, examples)
                report.piece_seconds.append(time.perf_counter() - piece_started)
            pieces[name] = distinct[key]
        report.num_pieces, report.num_distinct = len(pieces), len(distinct)
        run, report.source = stitch(whole, pieces)
        report.seconds = time.perf_counter() - started
        return run

    def _partition(self, graph: fx.GraphModule) -> tuple[dict[fx.Node, int], set[int]]:
        """Node -> number of its part, in order; and which parts are split ops."""
        partition: dict[fx.Node, int] = {}
        split_ids: set[int] = set()
        current = 0
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if _op_name(node) in self._split_ops:
                split_ids.add(current + 1)
                partition[node] = current + 1
                current += 2
            elif node.target is operator.getitem and node.args[0] in partition:
                partition[node] = partition[node.args[0]]  # no tuple crosses a cut
            else:
                partition[node] = current
        return partition, split_ids


def compile_with_inductor(piece: fx.GraphModule, examples: list[Any]) -> Piece:
    """Inductor C++ for one piece, for every number of tokens."""
    from torch._inductor import standalone_compile

    patches = {
        "size_asserts": False,
        "cpp.dynamic_threads": True,  # else the thread count of now is baked in
    }
    compiled: Piece = standalone_compile(
        piece,
        examples,
        dynamic_shapes="from_graph",
        options={"config_patches": patches},
        donate_graph_module=True,
    )
    return compiled


def structural_key(piece: fx.GraphModule) -> str:
    """Equal for pieces that compute the same from inputs of the same kind, whatever their names."""
    number = {node: index for index, node in enumerate(piece.graph.nodes)}

    def spell(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{number[value]}"
        if isinstance(value, (list, tuple)):
            return f"({','.join(map(spell, value))})"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{spell(entry)}' for key, entry in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({spell(value.start)},{spell(value.stop)},{spell(value.step)})"
        return repr(value)

    lines = []
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"input {_kind(node.meta['example_value'])}")
        else:
            lines.append(f"{node.op} {node.target} {spell(node.args)} {spell(node.kwargs)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def stitch(whole: fx.GraphModule, pieces: dict[str, Piece]) -> tuple[Callable[..., Any], str]:
    """The function that runs a split graph, generated as flat Python, and its source.

    `pieces` maps submodule names to compiled pieces; the other submodules hold one split op, which
    is called directly. A value is dropped after its last use.
    """
    names: dict[str, Any] = {f"run_{name}": piece for name, piece in pieces.items()}
    nodes = list(whole.graph.nodes)
    last_use = {used: index for index, node in enumerate(nodes) for used in node.all_input_nodes}
    parameters, lines = [], []
    for index, node in enumerate(nodes):
        if node.op == "placeholder":
            parameters.append(node.name)
        elif node.op == "output":
            lines.append(f"return {_spell(node.args[0])}")
            continue
        elif node.op == "call_module" and node.target in pieces:
            lines.append(f"{node.name} = run_{node.target}({_spell_all(node.args)})")
        elif node.op == "call_module":
            op, arguments = _split_call(whole.get_submodule(node.target), node)
            names[f"op_{node.target}"] = op
            lines.append(f"op_{node.target}({_spell_all(arguments)})")
        else:
            assert node.target is operator.getitem, f"{node} between pieces"
            lines.append(f"{node.name} = {_spell(node.args[0])}[{node.args[1]}]")
        dead = [n.name for n, last in last_use.items() if last == index and n.op != "placeholder"]
        if dead:
            lines.append(f"del {', '.join(dead)}")
    body = "\n    ".join(lines)
    source = f"def run({', '.join(parameters)}):\n    {body}\n"
    exec(compile(source, "<stitched pieces>", "exec"), names)
    run: Callable[..., Any] = names["run"]
    return run, source


def _split_call(module: torch.nn.Module, call: fx.Node) -> tuple[Any, list[Any]]:
    """(op, arguments in terms of the outer graph) of a submodule that holds one split op."""
    assert isinstance(module, fx.GraphModule)
    (op_node,) = (node for node in module.graph.nodes if node.op == "call_function")
    outer = dict(zip(module.graph.find_nodes(op="placeholder"), call.args))
    arguments = [outer.get(a, a) if isinstance(a, fx.Node) else a for a in op_node.args]
    op = op_node.target
    return (op if isinstance(op, torch._ops.OpOverload) else op.default), arguments


def _op_name(node: fx.Node) -> str | None:
    """namespace::op, if `node` calls a torch op."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.name()).partition(".")[0]
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return str(node.target._qualified_op_name)
    return None


def _partition_id(submodule_name: str) -> int:
    return int(submodule_name.rpartition("_")[2])


def _kind(example: Any) -> str:
    if isinstance(example, torch.Tensor):
        return f"{tuple(example.shape)} {example.stride()} {example.dtype} {example.device}"
    return str(example)


def _spell(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        return f"({''.join(f'{_spell(entry)}, ' for entry in value)})"
    return repr(value)


def _spell_all(values: Sequence[Any]) -> str:
    return ", ".join(map(_spell, values))
