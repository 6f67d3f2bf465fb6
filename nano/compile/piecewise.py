"""Piecewise tracing: a model's graph cut at named ops, and which of the pieces are alike.

Dynamo hands over one FX graph of the whole model. Its inputs are weights, and symbols for the sizes
that vary: of how many tokens, of how many of them the result is wanted. It is split at every op of
`split_ops` (attention), which stays an ordinary call between two compiled pieces:

    piece 0 | attention 0 | piece 1 | attention 1 | piece 1 again ... | piece 2

Layers are alike, so of some thirty pieces three are distinct, whatever the depth. A generated
function calls them in turn; nothing of FX runs in a step. Tracing executes nothing: the weights
may be uninitialised memory.
"""

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from nano.compile.request import InputKinds
from nano.compile.stitch import op_name, stitch

_TRACE_SIZE = 8  # which the compiler tunes for; any other is served as well


@dataclass(frozen=True, slots=True)
class Piece:
    """One distinct piece."""

    graph: fx.GraphModule
    examples: list[Any]  # its inputs, fake
    num_uses: int


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model as a function `run` over pieces: `run(*inputs)` calls `piece_<i>` and the split ops.

    `source` is that function; it finds weight i as the global `w<i>`, and a split op under
    `split_op_name`.
    """

    source: str
    weights: list[str]  # names of parameters and buffers
    pieces: list[Piece]
    num_calls: int  # of pieces, in `run`
    num_split_calls: int


def trace(model: nn.Module, inputs: InputKinds, split_ops: Sequence[str]) -> TracedModel:
    """Trace the forward of `model`, called with `inputs` of any sizes, and cut it.

    Guards are dropped: whatever the trace reads of the model is frozen. No later call can trace
    again, since what is kept is the code and not the traced function.
    """
    captured: list[TracedModel] = []

    def backend(graph: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        binding = _binding(graph, example_inputs, model, examples, inputs)
        captured.append(cut(graph, binding, split_ops))
        outputs = graph.graph.output_node().args[0]
        assert isinstance(outputs, tuple)
        return lambda *args: [torch.zeros(0)] * len(outputs)  # the skeleton computes nothing

    device = next((tensor.device for tensor in named_tensors(model).values()), None)
    examples = {
        name: torch.zeros(_TRACE_SIZE, dtype=getattr(torch, dtype), device=device)
        for name, (dtype, _) in inputs.items()
    }
    for name, (_, size) in inputs.items():
        # An unbacked size has no value to specialise on: one graph serves 1 to the budget.
        torch._dynamo.decorators.mark_unbacked(
            examples[name], 0, hint_override=_TRACE_SIZE, shape_id=size
        )
    forward = torch.compile(
        model.forward,
        backend=backend,
        fullgraph=True,
        dynamic=False,
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )
    with torch.inference_mode():
        forward(**examples)
    (traced,) = captured  # one graph: a break is an error
    return traced


@dataclass(frozen=True, slots=True)
class Binding:
    """What a graph's placeholders stand for."""

    inputs: list[str]  # of `run`, in order
    sizes: dict[str, str]  # name of a size -> an input that has it
    weights: list[str]
    spelling: dict[str, str]  # placeholder -> the name of an input or a size, or w<i>


def _binding(
    graph: fx.GraphModule,
    example_inputs: list[Any],
    model: nn.Module,
    examples: Mapping[str, Tensor],
    inputs: InputKinds,
) -> Binding:
    names = {id(tensor): name for name, tensor in named_tensors(model).items()}
    input_names = {id(tensor): name for name, tensor in examples.items()}
    placeholders = graph.graph.find_nodes(op="placeholder")
    size_names = {  # by symbol
        str(node.meta["example_value"].shape[0]): inputs[input_names[id(example)]][1]
        for node, example in zip(placeholders, example_inputs)
        if id(example) in input_names
    }
    weights: list[str] = []
    spelling: dict[str, str] = {}
    for node, example in zip(placeholders, example_inputs, strict=True):
        if not isinstance(example, Tensor):
            spelling[node.name] = size_names[str(node.meta["example_value"])]
        elif id(example) in input_names:
            spelling[node.name] = input_names[id(example)]
        elif id(example) in names:
            spelling[node.name] = f"w{len(weights)}"
            weights.append(names[id(example)])
        else:
            raise RuntimeError(
                f"the traced graph reads {node.name}, which is no tensor of the model"
            )
    sizes: dict[str, str] = {}
    for name, (_, size) in inputs.items():
        sizes.setdefault(size, name)
    return Binding(list(inputs), sizes, weights, spelling)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def cut(graph: fx.GraphModule, binding: Binding, split_ops: Sequence[str]) -> TracedModel:
    """Split `graph` at `split_ops`, find equal pieces, and write the function that runs them."""
    partition, split_parts = _partition(graph, frozenset(split_ops))
    whole = split_module(
        graph,
        None,  # type: ignore[arg-type]  # only its place in old torchs
        lambda node: partition[node],
        keep_original_order=True,  # attention mutates its output
    )
    _return_tuples(whole)
    graphs: dict[str, fx.GraphModule] = {}  # by structural key
    num_uses: dict[str, int] = {}
    piece_of: dict[str, int] = {}  # submodule -> index of its piece
    num_split_calls = 0
    for name, part in whole.named_children():
        assert isinstance(part, fx.GraphModule)
        if int(name.rpartition("_")[2]) in split_parts:
            num_split_calls += 1
            continue
        key = structural_key(part)
        graphs.setdefault(key, part)
        num_uses[key] = num_uses.get(key, 0) + 1
        piece_of[name] = list(graphs).index(key)
    pieces = []
    for key, part in graphs.items():
        placeholders = part.graph.find_nodes(op="placeholder")
        examples = [node.meta["example_value"] for node in placeholders]
        pieces.append(Piece(part, examples, num_uses[key]))
    return TracedModel(
        source=stitch(whole, piece_of, binding.inputs, binding.sizes, binding.spelling),
        weights=binding.weights,
        pieces=pieces,
        num_calls=len(piece_of),
        num_split_calls=num_split_calls,
    )


def _partition(
    graph: fx.GraphModule, split_ops: frozenset[str]
) -> tuple[dict[fx.Node, int], set[int]]:
    """Node -> number of its part, in order; and which parts are split ops."""
    partition: dict[fx.Node, int] = {}
    split_parts: set[int] = set()
    current = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if op_name(node) in split_ops:
            split_parts.add(current + 1)
            partition[node] = current + 1
            current += 2
        elif node.target is operator.getitem and isinstance(node.args[1], int):
            partition[node] = partition[node.args[0]]  # no tuple crosses a cut
        else:
            partition[node] = current
    return partition, split_parts


def _return_tuples(whole: fx.GraphModule) -> None:
    """Let every part return a tuple, also of one value: that is what the compiler takes."""
    for call in whole.graph.find_nodes(op="call_module"):
        part = whole.get_submodule(call.target)
        assert isinstance(part, fx.GraphModule)
        output = part.graph.output_node()
        if isinstance(output.args[0], tuple):
            continue
        output.args = (output.args,)
        part.recompile()
        with whole.graph.inserting_after(call):
            value = whole.graph.call_function(operator.getitem, (call, 0))
        call.replace_all_uses_with(
            value, delete_user_cb=lambda user, value=value: user is not value
        )


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


def _kind(example: Any) -> str:
    if isinstance(example, Tensor):
        return f"{tuple(example.shape)} {example.stride()} {example.dtype} {example.device}"
    return str(example)
