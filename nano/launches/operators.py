"""TracedOperators: whatever torch is asked for that no other seam tells of."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nano.device.recording_graph import HOST_READS
from nano.launches.sequence import Kind, LaunchSequence

_ALLOCATIONS = ("empty", "new_empty")  # how the names of operators begin that launch nothing


class TracedOperators(TorchDispatchMode):
    """Active around a step: every operator that launches work, moves data, or makes the host wait.

    Views and allocations do not. What does not pass the dispatcher, such as a kernel of Triton
    that is launched by hand, is not seen.
    """

    def __init__(self, sequence: LaunchSequence):
        super().__init__()
        self._sequence = sequence

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        name = schema.name.partition("::")[2]
        writes = any(a.alias_info and a.alias_info.is_write for a in schema.arguments)
        is_view = not writes and any(r.alias_info for r in schema.returns)
        if name in HOST_READS:
            self._sequence.add("read", f"unplanned, by {name}")
            self._sequence.add("wait", f"in {name}")
        elif not is_view and not name.startswith(_ALLOCATIONS):
            given = _tensors((args, kwargs))
            self._add(name, result, {x.device.type for x in given if x.dim()})  # scalars go along
        return result

    def _add(self, name: str, result: Any, devices: set[str]) -> None:
        """An operator on tensors of these kinds of device. Those over no elements are not launched.

        On a GPU, one that moves data between host and device is a copy or a read.
        """
        made = next(_tensors(result), None)
        if made is not None and not made.numel():
            return
        kind: Kind = "operator"
        if made is not None and len(devices | {made.device.type}) > 1:
            kind = "read" if made.device.type == "cpu" else "copy"
            name = f"by {name} {list(made.shape)}"
        self._sequence.add(kind, name)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
