"""CudaGraphs: a model's forward that replays what it has captured, where a step fits a graph.

How a forward is captured: it is run over a step of padding, and each call of attention ends one
graph and begins the next. So whatever computes the model (op by op, or in compiled pieces) is
captured as it is, and nothing has to know where its pieces are:

    piecewise   graph 0 | attention | graph 1 | attention | ... | graph L     attention as ever
    full        graph 0, attention included

Values that pass from graph to graph, and what is returned, lie in the pool and are owned by
nobody: layers and captures use the same memory in turn. A result is to be read before the next
step of any graph.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from nano.attention.op import ForwardContext, forward_context
from nano.compile.artifact import ForwardFn
from nano.compile.graph_keys import GraphKey, GraphKeys, StepShape
from nano.compile.graphed_attention import AttentionCall, GraphedAttention
from nano.device.graph import Graph, GraphPool
from nano.log import get_logger

logger = get_logger(__name__)

# Half a minute of a busy engine: a size of one step in a hundred has been seen twenty times.
_FIRST_STEPS = 2000
_WORTH_CAPTURING = 0.05  # of all tokens: captures take seconds, in which steps run eagerly


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The graphs of one key, the attention calls between them, and where the result is."""

    graphs: list[Graph]
    calls: list[AttentionCall]  # one fewer
    hidden: Tensor  # [T, hidden], padding included


@dataclass(slots=True)
class GraphCounts:
    """What became of the steps so far."""

    num_full: int = 0
    num_piecewise: int = 0
    num_padding_tokens: int = 0
    eager: Counter[str] = field(default_factory=Counter)  # by reason


class CudaGraphs:
    """Called like `model.forward`, inside `context`. Owns the graphs of one model over one cache.

    Whoever runs steps uses its `context` in place of the one it was made with: planning a step
    there settles which graph it is. Until a key is captured its steps run eagerly, so capturing
    may be done between any two steps.
    """

    def __init__(
        self,
        forward: ForwardFn,
        context: ForwardContext,
        keys: GraphKeys,
        pool: GraphPool,
        *,
        device: torch.device,
        max_model_len: int,
    ):
        self.counts = GraphCounts()
        self._forward = forward
        self._pool = pool
        self._captured: dict[GraphKey, CapturedStep] = {}
        self._attention = GraphedAttention(
            context.backend, keys, self._captured, device=device, max_model_len=max_model_len
        )
        self._all_rows = torch.arange(keys.max_num_tokens, device=device)
        self.context = ForwardContext(self._attention, context.kv_caches)
        self._waiting = keys.capture_order()
        self._num_steps_to_see = _FIRST_STEPS

    @property
    def shapes(self) -> Mapping[StepShape, int]:
        """How often a step of each shape was planned, of those small enough for graphs."""
        return self._attention.shapes

    @property
    def captured(self) -> list[GraphKey]:
        """In the order of their capture."""
        return list(self._captured)

    def __call__(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """input_ids [T] int32, positions and rows [L] int64 of the step that was planned -> [L,
        hidden]. A graph computes all rows: how many are wanted it cannot know."""
        step, counts = self._attention.step, self.counts
        if step.key is None:
            counts.eager[step.why_eager] += 1
            return self._forward(input_ids, positions, rows)
        num_tokens = len(input_ids) + step.num_padding_tokens
        assert num_tokens == step.key.num_tokens, "another step's plan"
        if step.key.is_full:
            counts.num_full += 1
        else:
            counts.num_piecewise += 1
        counts.num_padding_tokens += step.num_padding_tokens
        self._attention.load_tokens(step.key, input_ids, positions)
        captured = self._captured[step.key]
        for graph, call in zip_longest(captured.graphs, captured.calls):
            graph.replay()
            if call is not None:
                self._attention.forward(*call)
        return captured.hidden[rows]

    @property
    def num_waiting(self) -> int:
        """Keys that are still to be captured."""
        return len(self._waiting)

    def capture_next(self) -> bool:
        """Capture the largest key that waits; whether any is left. Between two steps.

        A key that cannot be captured is left out, with a warning: its steps go on eagerly.
        """
        if self._waiting:
            key = self._waiting.pop(0)
            try:
                self._captured[key] = self._capture(key)
            except RuntimeError as error:  # no memory, above all
                logger.warning("no graph for %s: %s", key, error)
        return bool(self._waiting)

    def capture_all(self) -> None:
        while self.capture_next():
            pass
        logger.info("captured %d steps as graphs", len(self._captured))

    def forget(self, pool: GraphPool, keys: GraphKeys | None = None) -> None:
        """Drop every graph, to be captured anew: `forward` computes in another way now, or there
        are better `keys`.

        `pool` is a new one: CUDA lets nobody capture into a pool that no graph is left in.
        """
        self._captured.clear()
        self._attention.forget_graphs()
        self._pool = pool
        self._attention.keys = keys or self._attention.keys
        self._waiting = self._attention.keys.capture_order()

    def better_keys(self) -> GraphKeys | None:
        """Keys by which the steps seen so far would be padded so much less that it is worth
        capturing all graphs anew. None while there are too few steps to tell.

        Looks again whenever their number has doubled, so a load that changes to and fro costs few
        captures.
        """
        shapes, keys = self.shapes, self._attention.keys
        num_steps = sum(shapes.values())
        if self._waiting or num_steps < self._num_steps_to_see:
            return None
        self._num_steps_to_see = 2 * num_steps
        fitted = keys.fitted(shapes)
        old, new = (x.num_padding_tokens(shapes) for x in (keys, fitted))
        num_tokens = sum(count * shape.num_tokens for shape, count in shapes.items())
        if old - new < _WORTH_CAPTURING * num_tokens:
            return None
        logger.info(
            "graphs: other sizes pad the %d steps so far with %d tokens instead of %d",
            num_steps,
            new,
            old,
        )
        return fitted

    @torch.inference_mode()
    def _capture(self, key: GraphKey) -> CapturedStep:
        inputs = (*self._attention.tokens(key), self._all_rows[: key.num_tokens])
        recording = _Recording(self._pool)
        with self._pool.capturing(), forward_context(self.context):
            if key.is_full:
                self._attention.plan_padding(key)
                self._forward(*inputs)  # what is made on first use is made now
                with recording.running():
                    hidden = self._forward(*inputs)
            else:
                with self._attention.cutting(lambda call: None):
                    self._forward(*inputs)
                with self._attention.cutting(recording.cut), recording.running():
                    hidden = self._forward(*inputs)
        return CapturedStep(recording.graphs, recording.calls, self._pool.alias(hidden))


class _Recording:
    """A capture that is under way."""

    def __init__(self, pool: GraphPool):
        self.graphs: list[Graph] = []
        self.calls: list[AttentionCall] = []
        self._pool = pool

    @contextmanager
    def running(self) -> Iterator[None]:
        self._begin()
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the device cannot do anything else before it has ended
                self.graphs[-1].end()
            raise
        self.graphs[-1].end()

    def cut(self, call: AttentionCall) -> None:
        """End a graph at a call of attention, and begin the next."""
        self.graphs[-1].end()
        q, k, v, kv_cache, out = call
        alias = self._pool.alias
        self.calls.append((alias(q), alias(k), alias(v), kv_cache, alias(out)))
        self._begin()

    def _begin(self) -> None:
        graph = self._pool.new_graph()
        graph.begin()
        self.graphs.append(graph)
