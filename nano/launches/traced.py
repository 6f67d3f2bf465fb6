"""What stands at the seams of a worker that is listened to, and tells a LaunchSequence.

    device       copies to it and from it; graphs that are made and replayed   (traced_device.py)
    attention    plans, and calls that are part of no graph
    forward      which graph was chosen, or why none
    sampling     calls of the backend
    operators    whatever else torch is asked for                              (operators.py)

Each passes on what it gets to the part that it stands for. The worker knows nothing of it.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionMetadata
from nano.attention.op import ForwardContext
from nano.compile.artifact import ForwardFn
from nano.compile.cuda_graphs import CudaGraphs
from nano.compile.graph_keys import Dispatch, StepShape
from nano.compile.graphed_attention import GraphedAttention
from nano.device import Device
from nano.kv_spec import LayerKVSpec
from nano.launches.sequence import LaunchSequence, counted
from nano.launches.traced_device import TracedDevice, as_device
from nano.sampling.backend import SamplingBackend
from nano.sampling.sampler import Sampler
from nano.worker.worker import Worker, WorkerInfo


def listen(worker: Worker, device: Device, info: WorkerInfo, sequence: LaunchSequence) -> None:
    """Put traced parts into a worker that is loaded and has not yet run a step.

    Its device is a `TracedDevice` over `device`, of the same sequence.
    """
    runner, proposers = worker.runner, worker.speculation.proposers
    runner.model_forward, runner.context = _traced(
        runner.model_forward, runner.context, sequence, ""
    )
    runner.batch_builder.device = as_device(TracedDevice(device, sequence, ""))
    sampler = runner.sampler  # all share it; a copy of it goes on to choose backends
    sampler.backend = TracedSampling(copy.copy(sampler), sequence)
    for name, drafting in worker.speculation.drafting.items():
        forward, context = _traced(drafting.forward, drafting.context, sequence, name)
        drafting.builder.device = as_device(TracedDevice(device, sequence, name))
        traced = dataclasses.replace(drafting, forward=forward, context=context)
        proposers.model(name).bind(traced, info.kv_cache.num_blocks)


def _traced(
    forward: ForwardFn, context: ForwardContext, sequence: LaunchSequence, model: str
) -> tuple[ForwardFn, ForwardContext]:
    """What to run the steps of `context` with instead."""
    graphed = context.backend
    if isinstance(graphed, GraphedAttention):
        attention = graphed.inner = TracedAttention(graphed.inner, sequence, model)
    else:
        attention = TracedAttention(graphed, sequence, model)
        context = dataclasses.replace(context, backend=attention)
    return TracedForward(forward, attention, sequence, model), context


class TracedAttention(AttentionBackend):
    """Stands for the backend that computes, behind the one that pads for graphs."""

    name = "traced"

    def __init__(self, inner: AttentionBackend, sequence: LaunchSequence, model: str):
        super().__init__(inner.block_size, inner.scale)
        self.inner = inner
        self.shape = StepShape(0, 0, 0, True)  # of the step that was planned last
        self._sequence = sequence
        self._model = model
        self._num_calls = 0  # since then

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        return "it wraps another backend"

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        return self.inner.kv_cache_shape(spec, num_blocks)

    def plan(self, metadata: AttentionMetadata) -> None:
        self._begin(metadata)
        self.inner.plan(metadata)
        self._tell("any mix of rows")

    def reserve_graph(self, num_requests: int, query_len: int, max_blocks: int) -> None:
        self.inner.reserve_graph(num_requests, query_len, max_blocks)

    def forget_graphs(self) -> None:
        self.inner.forget_graphs()

    def plan_graph(self, metadata: AttentionMetadata, num_requests: int) -> None:
        self._begin(metadata)
        self.inner.plan_graph(metadata, num_requests)
        self._tell(f"for a graph of {num_requests} x {metadata.max_query_len}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        self._num_calls += 1
        self._sequence.add("attention", f"layer {self._num_calls}", self._model)
        with self._sequence.hiding():
            self.inner.forward(q, k, v, kv_cache, out)

    def _begin(self, metadata: AttentionMetadata) -> None:
        self.shape = StepShape.of(metadata)
        self._num_calls = 0
        self._sequence.model = self._model

    def _tell(self, what: str) -> None:
        """After the plan: what serves it is known then, and its operators came before it."""
        wrapper = getattr(self.inner, "wrapper", None)  # FlashInfer has several
        name = self.inner.name if wrapper is None else type(wrapper).__name__
        requests = counted(self.shape.num_requests, "request")
        rows = counted(self.shape.num_tokens, "row")
        self._sequence.add("plan", f"{name}, {what}: {requests}, {rows}")


class TracedForward:
    """A `ForwardFn`: with graphs, or without."""

    def __init__(
        self, inner: ForwardFn, attention: TracedAttention, sequence: LaunchSequence, model: str
    ):
        self._inner = inner
        self._attention = attention
        self._sequence = sequence
        self._model = model

    def __call__(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        step = Dispatch(None, why_eager="no graphs on this device, or none wanted")
        if isinstance(self._inner, CudaGraphs):
            graphed = self._inner.context.backend
            assert isinstance(graphed, GraphedAttention)
            step = graphed.step
        if step.key is None:
            self._sequence.add("eager", step.why_eager, self._model)
        else:
            shape, padding = self._attention.shape, step.num_padding_tokens
            longest = counted(shape.query_len, "token")
            each = f"{longest} each" if shape.is_uniform else f"up to {longest}"
            what = f"{step.key}: {counted(shape.num_requests, 'request')} of {each}"
            what += f", {padding} of padding" if padding else ", no padding"
            self._sequence.add("graph", what, self._model)
        return self._inner(input_ids, positions, rows)


class TracedSampling(SamplingBackend):
    """Stands for whichever backends `chooser` has."""

    name = "traced"

    def __init__(self, chooser: Sampler, sequence: LaunchSequence):
        super().__init__(chooser.transfers)
        self._chooser = chooser
        self._sequence = sequence

    @classmethod
    def is_available(cls, dtype: torch.dtype, device: torch.device) -> bool:
        return True

    def penalise(self, logits: Tensor, *args: Any, **options: Any) -> Any:
        return self._for(logits, "penalties").penalise(logits, *args, **options)

    def draw(self, logits: Tensor, *args: Any, **options: Any) -> Any:
        return self._for(logits, "draw").draw(logits, *args, **options)

    def gather_logprobs(self, logits: Tensor, *args: Any, **options: Any) -> Any:
        return self._for(logits, "logprobs").gather_logprobs(logits, *args, **options)

    def _for(self, logits: Tensor, what: str) -> SamplingBackend:
        backend = self._chooser.backend_for(logits.dtype)
        self._sequence.add("sampling", f"{what}: {counted(len(logits), 'row')} ({backend.name})")
        return backend
