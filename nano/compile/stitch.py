"""The stitched function: a split graph as flat Python. Weights are its globals, not arguments."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from nano.compile.artifact import split_op_name


def stitch(
    whole: fx.GraphModule,
    piece_of: Mapping[str, int],
    inputs: Sequence[str],
    sizes: Mapping[str, str],
    spelling: Mapping[str, str],
) -> str:
    """Source of `run(*inputs)`.

    `piece_of` maps submodules to the number of their piece; the other submodules hold one split op,
    which is called directly. `sizes` maps the name of a size to an input that has it. `spelling`
    says how each placeholder is written. A value is dropped after its last use.
    """
    return _Stitcher(whole, piece_of, spelling).source(inputs, sizes)


class _Stitcher:
    def __init__(
        self, whole: fx.GraphModule, piece_of: Mapping[str, int], spelling: Mapping[str, str]
    ):
        self._whole = whole
        self._piece_of = piece_of
        self._spelling = dict(spelling)  # values that pieces return join it
        self._is_input = frozenset(spelling)
        self._nodes = list(whole.graph.nodes)

    def source(self, inputs: Sequence[str], sizes: Mapping[str, str]) -> str:
        lines = [f"{size} = {name}.shape[0]" for size, name in sizes.items()]
        last_use = {
            used: index for index, node in enumerate(self._nodes) for used in node.all_input_nodes
        }
        for index, node in enumerate(self._nodes):
            if node.op == "call_module":
                lines.append(self._call(node))
                dead = [n for n in node.all_input_nodes if last_use[n] == index]
                dead = [n for n in dead if n.name not in self._is_input]
                if dead:
                    lines.append(f"del {self._spell_all(dead)}")
            elif node.op == "output":
                lines.append(f"return {self._spell(self._result(node))}")
            else:
                # What a piece returns is unpacked where it is called.
                assert node.op == "placeholder" or node.target is operator.getitem, node
        body = "\n    ".join(lines)
        return f"def run({', '.join(inputs)}):\n    {body}\n"

    def _call(self, node: fx.Node) -> str:
        assert isinstance(node.target, str)
        piece = self._piece_of.get(node.target)
        if piece is None:
            op, arguments = _split_call(self._whole.get_submodule(node.target), node)
            return f"{split_op_name(op)}({self._spell_all(arguments)})"
        outputs = ["_"] * _num_outputs(self._whole, node.target)
        for user in node.users:
            assert user.target is operator.getitem, user
            index = user.args[1]
            assert isinstance(index, int)
            outputs[index] = self._spelling[user.name] = f"v{len(self._spelling)}"
        return f"{', '.join(outputs)}, = piece_{piece}({self._spell_all(node.args)})"

    def _result(self, output: fx.Node) -> Any:
        """The one tensor that the model returns."""
        (values,) = output.args
        assert isinstance(values, (tuple, list))
        (value,) = values
        return value

    def _spell(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._spelling[value.name]
        return repr(value)

    def _spell_all(self, values: Sequence[Any]) -> str:
        return ", ".join(map(self._spell, values))


def _num_outputs(whole: fx.GraphModule, name: str) -> int:
    module = whole.get_submodule(name)
    assert isinstance(module, fx.GraphModule)
    (outputs,) = module.graph.output_node().args
    assert isinstance(outputs, tuple)
    return len(outputs)


def _split_call(module: nn.Module, call: fx.Node) -> tuple[str, list[Any]]:
    """("namespace::op", arguments in terms of the outer graph) of a submodule with one split op."""
    assert isinstance(module, fx.GraphModule)
    (op_node,) = (node for node in module.graph.nodes if node.op == "call_function")
    outer = dict(zip(module.graph.find_nodes(op="placeholder"), call.args))
    arguments = [outer.get(a, a) if isinstance(a, fx.Node) else a for a in op_node.args]
    name = op_name(op_node)
    assert name is not None
    return name, arguments


def op_name(node: fx.Node) -> str | None:
    """namespace::op, if `node` calls a torch op."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.name()).partition(".")[0]
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return str(node.target._qualified_op_name)
    return None
