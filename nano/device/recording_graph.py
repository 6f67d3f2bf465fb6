"""RecordingPool: graphs on a CPU, as strict as the real ones; RecordingCpu: a device that has them.

What a device with graphs would do can be seen and tested without one. A graph records the stream
of operators under torch's dispatcher; a replay runs them again, on the same arguments and into the
same storages, without any Python of the model. What would go wrong on a GPU goes wrong here:

- a Python number baked in at capture, or an input that was bound anew: a replay does not see it;
- a value of the device that is read on the host while capturing: refused;
- memory that is not where it was at capture: refused;
- values kept from one capture to another: before a capture is replayed, the floats that all
  others have made become NaN, as memory that was shared would be.

Unlike CUDA it computes while it captures. Compiled C++ does not pass the dispatcher, so it records
models op by op.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nano.device.cpu import CpuDevice
from nano.device.graph import Graph, GraphPool

# Operators by which the host reads the device: with and without inference mode, which leaves
# composite ones whole.
HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"}


@dataclass(slots=True)
class _Operation:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[tuple[int, Tensor]]  # (index among its outputs, where a replay writes it)
    places: list[tuple[Tensor, tuple[Any, ...]]]  # arguments, and where they lay


@dataclass(slots=True)
class _Capture:
    """What the graphs of one capture have in common."""

    made: dict[int, Tensor] = field(default_factory=dict)  # storage -> a tensor in it


class RecordingCpu(CpuDevice):
    """The CPU, as a device with graphs. `pools`: all that were made, one for each model."""

    supports_graphs = True

    def __init__(self, num_threads: int | None = None):
        super().__init__(num_threads)
        self.pools: list[RecordingPool] = []

    def graph_pool(self) -> GraphPool:
        self.pools.append(RecordingPool())
        return self.pools[-1]


class RecordingGraph:
    def __init__(self, pool: "RecordingPool", capture: _Capture):
        self._pool = pool
        self._capture = capture
        self._recorder = _Recorder(capture)
        self._operations: list[_Operation] | None = None

    def begin(self) -> None:
        assert self._operations is None, "a graph is captured once"
        assert not self._pool.is_capturing, "one capture at a time"
        self._pool.is_capturing = True
        self._recorder.__enter__()

    def end(self) -> None:
        self._recorder.__exit__(None, None, None)
        self._pool.is_capturing = False
        self._operations = self._recorder.operations

    def replay(self) -> None:
        assert self._operations is not None, "never captured to its end"
        assert not self._pool.is_capturing
        self._pool.num_replays += 1
        self._pool.spoil_all_but(self._capture)
        for operation in self._operations:
            for tensor, place in operation.places:
                assert _place(tensor) == place, f"{operation.function} reads what has moved"
            outputs = tree_leaves(operation.function(*operation.args, **operation.kwargs))
            for index, tensor in operation.made:
                tensor.copy_(outputs[index])


class RecordingPool:
    """`num_graphs[i]` are the graphs of capture i, in the order of captures."""

    def __init__(self) -> None:
        self.num_graphs: list[int] = []
        self.num_replays = 0
        self.is_capturing = False
        self._captures: list[_Capture] = []
        self._last: _Capture | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._captures.append(_Capture())
        self.num_graphs.append(0)
        yield

    def new_graph(self) -> Graph:
        self.num_graphs[-1] += 1
        return RecordingGraph(self, self._captures[-1])

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor

    def owns(self, tensor: Tensor) -> bool:
        return any(_storage(tensor) in capture.made for capture in self._captures)

    def spoil_all_but(self, mine: _Capture) -> None:
        if mine is self._last:
            return
        self._last = mine
        for capture in self._captures:
            if capture is not mine:
                for tensor in capture.made.values():
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))


class _Recorder(TorchDispatchMode):
    def __init__(self, capture: _Capture):
        super().__init__()
        self.operations: list[_Operation] = []
        self._capture = capture

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.partition("::")[2]
        if name in HOST_READS:
            raise RuntimeError(f"{name}: the host reads the device during a capture")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = [(tensor, _place(tensor)) for tensor in inputs]
        result = function(*args, **kwargs)
        given = {_storage(tensor) for tensor in inputs}
        made = [
            (index, leaf)
            for index, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor) and _storage(leaf) not in given
        ]
        for _, tensor in made:
            whole = tensor.detach()
            self._capture.made.setdefault(_storage(tensor), whole)
        writes = any(a.alias_info and a.alias_info.is_write for a in function._schema.arguments)
        if made or writes:  # all else is views
            self.operations.append(_Operation(function, args, kwargs, made, places))
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
