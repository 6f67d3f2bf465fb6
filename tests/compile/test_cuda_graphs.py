"""A model run through graphs equals the eager model, bit for bit; and what graphs are made of.

The graphs are recorded ones, strict about what a real graph would not notice.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionMetadata
from nano.attention.op import ForwardContext, attention, forward_context
from nano.attention.reference_backend import ReferenceBackend
from nano.compile import cuda_graphs
from nano.compile.artifact import ForwardFn
from nano.compile.cuda_graphs import CudaGraphs
from nano.compile.graph_keys import GraphKey, GraphKeys
from nano.config import EngineConfig
from nano.device import CpuDevice
from nano.device.recording_graph import RecordingPool
from nano.kv_spec import LayerKVSpec
from nano.layers.native_kernels import NativeKernels
from nano.resolve import resolve
from nano.spec.proposers import Proposers
from nano.worker.loaded_model import LoadedModel
from nano.worker.model_runner import ModelRunner
from tests.compile.random_steps import RandomSteps
from tests.tiny import VOCAB_SIZE, make_checkpoint

CPU = torch.device("cpu")
NUM_LAYERS, MAX_MODEL_LEN, NUM_REQUESTS, BUDGET = 2, 64, 6, 40
KEYS = GraphKeys((1, 4, 16, 32), {1: (1, 2, 4), 3: (1, 4)})
PIECEWISE_ONLY = dataclasses.replace(KEYS, request_buckets={})
FULL_ONLY = dataclasses.replace(KEYS, token_buckets=())

pytestmark = pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("graphs"), num_hidden_layers=NUM_LAYERS)
    return load(checkpoint)


def load(checkpoint: Path) -> LoadedModel:
    args = {"model": str(checkpoint), "max_model_len": MAX_MODEL_LEN, "compile_mode": "eager"}
    return LoadedModel(resolve(EngineConfig.from_args(args)), CpuDevice(), show_progress=False)


def make_runner(
    loaded: LoadedModel, backend_class: type[AttentionBackend] | None = None
) -> ModelRunner:
    """Its cache is full of NaN: whatever reads what was never written shows it."""
    block_size = loaded.config.kv_cache.block_size
    num_blocks = NUM_REQUESTS * -(-MAX_MODEL_LEN // block_size)
    runner = loaded.make_runner(Proposers(), num_blocks, NUM_REQUESTS, BUDGET)
    if backend_class is not None:
        backend = backend_class(block_size, loaded.backend.scale)
        caches = [
            torch.empty(backend.kv_cache_shape(layer, num_blocks)) for layer in loaded.kv_layers
        ]
        runner.context = ForwardContext(backend, caches)
    for cache in runner.context.kv_caches:
        cache.fill_(float("nan"))
    return runner


def add_graphs(
    loaded: LoadedModel, runner: ModelRunner, keys: GraphKeys, *, forward: ForwardFn | None = None
) -> tuple[CudaGraphs, RecordingPool]:
    pool = RecordingPool()
    graphs = CudaGraphs(
        forward or loaded.model.forward,
        runner.context,
        keys,
        pool,
        device=CPU,
        max_model_len=MAX_MODEL_LEN,
    )
    runner.model_forward, runner.context = graphs, graphs.context
    return graphs, pool


def make_steps(loaded: LoadedModel, seed: int, foretold: dict | None = None) -> RandomSteps:
    return RandomSteps(
        seed,
        num_requests=NUM_REQUESTS,
        max_model_len=MAX_MODEL_LEN,
        block_size=loaded.config.kv_cache.block_size,
        vocab_size=VOCAB_SIZE,
        foretold=foretold,
    )


@torch.inference_mode()
def compare(
    steps: RandomSteps,
    eager: ModelRunner,
    graphed: ModelRunner,
    num_steps: int,
    *,
    num_drafts: int | None = None,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Run both over the same steps; every bit of hidden states, and all outputs, must be equal."""
    for _ in range(num_steps):
        plan = steps.plan(BUDGET, num_drafts)
        eager.forward(plan)
        graphed.forward(plan)
        assert torch.equal(eager.hidden.view(torch.int32), graphed.hidden.view(torch.int32))
        output, other = eager.sample(), graphed.sample()
        assert output.token_ids == other.token_ids
        assert output.logprobs == other.logprobs
        steps.update(plan, output)
        between()


@pytest.fixture(scope="module")
def foretold(loaded: LoadedModel) -> dict[str, list[int]]:
    """What the requests of random steps will say."""
    runner, steps = make_runner(loaded), make_steps(loaded, 0)
    for _ in range(250):
        plan = steps.plan(BUDGET)
        steps.update(plan, runner.execute(plan))
    return steps.token_ids


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "keys", [KEYS, PIECEWISE_ONLY, FULL_ONLY, GraphKeys()], ids=["both", "pieces", "full", "none"]
)
def test_steps_of_any_mix_equal_the_eager_model_bit_for_bit(loaded, foretold, keys, seed):
    eager, graphed = make_runner(loaded), make_runner(loaded)
    graphs, pool = add_graphs(loaded, graphed, keys)
    graphs.capture_all()
    assert graphs.captured == keys.capture_order()
    steps = make_steps(loaded, seed, foretold)
    for num_drafts in (None, 0, 2):  # any, decode alone, verification alone
        compare(steps, eager, graphed, 30, num_drafts=num_drafts)
    counts = graphs.counts
    assert (counts.num_full > 15) == bool(keys.request_buckets)
    assert (counts.num_piecewise > 15) == bool(keys.token_buckets)
    num_eager = sum(counts.eager.values())
    assert sum(graphs.shapes.values()) == 90
    assert counts.num_full + counts.num_piecewise + num_eager == 90
    assert pool.num_replays == counts.num_full + (NUM_LAYERS + 1) * counts.num_piecewise
    is_padded = any((keys.token_buckets, keys.request_buckets))
    assert (counts.num_padding_tokens > 0) == is_padded


def test_a_backend_that_cannot_be_captured_serves_pieces(loaded, foretold):
    eager = make_runner(loaded, ReferenceBackend)
    graphed = make_runner(loaded, ReferenceBackend)
    graphs, _ = add_graphs(loaded, graphed, PIECEWISE_ONLY)
    graphs.capture_all()
    compare(make_steps(loaded, 5, foretold), eager, graphed, 12)
    assert graphs.counts.num_piecewise > 0


def test_a_piecewise_step_is_cut_at_every_attention_and_a_full_one_nowhere(loaded):
    graphs, pool = add_graphs(loaded, make_runner(loaded), KEYS)
    graphs.capture_all()
    num_pieces = len(KEYS.token_buckets)
    assert pool.num_graphs[:num_pieces] == [NUM_LAYERS + 1] * num_pieces
    assert pool.num_graphs[num_pieces:] == [1] * (len(KEYS.capture_order()) - num_pieces)


def test_steps_may_be_captured_while_requests_run(loaded, foretold):
    eager, graphed = make_runner(loaded), make_runner(loaded)
    graphs, _ = add_graphs(loaded, graphed, KEYS)
    compare(make_steps(loaded, 7, foretold), eager, graphed, 40, between=graphs.capture_next)
    assert graphs.captured == KEYS.capture_order()
    assert any(why.startswith("not captured: ") for why in graphs.counts.eager)
    assert graphs.counts.num_piecewise > 0


def test_what_a_step_returns_are_the_rows_that_were_asked_for_and_no_padding():
    graphs, _ = graphs_of(small_forward, GraphKeys((8,)))
    graphs.capture_all()
    graphs.context.backend.plan(decode_step(5))
    tokens, rows = torch.arange(5), torch.tensor([4, 0])
    with torch.inference_mode(), forward_context(graphs.context):
        hidden = graphs(tokens.int(), tokens, rows)
    run(graphs, 3)  # does not touch it
    assert hidden.tolist() == [[17.0], [1.0]]
    assert graphs.counts.num_piecewise == 2


def test_a_swapped_forward_is_seen_once_its_graphs_are_forgotten(loaded):
    scale = [1.0]

    def forward(*inputs: Tensor) -> Tensor:
        return loaded.model.forward(*inputs) * scale[0]

    eager, graphed = make_runner(loaded), make_runner(loaded)
    graphs, _ = add_graphs(loaded, graphed, PIECEWISE_ONLY, forward=forward)
    graphs.capture_all()
    eager.model_forward = forward
    scale[0] = 2.0  # which the graphs do not read
    with pytest.raises(AssertionError):
        compare(make_steps(loaded, 0), eager, graphed, 1)
    eager, graphed = make_runner(loaded), make_runner(loaded)
    eager.model_forward = forward
    graphs, _ = add_graphs(loaded, graphed, PIECEWISE_ONLY, forward=forward)
    graphs.capture_all()
    graphs.forget(RecordingPool())
    assert graphs.captured == []
    scale[0] = 3.0
    graphs.capture_all()
    compare(make_steps(loaded, 0), eager, graphed, 10)
    assert graphs.counts.num_piecewise > 0


def test_graphs_of_sizes_that_pad_less_say_the_same(loaded, foretold, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_FIRST_STEPS", 40)
    eager, graphed = make_runner(loaded), make_runner(loaded)
    graphs, pool = add_graphs(loaded, graphed, KEYS)
    graphs.capture_all()
    steps = make_steps(loaded, 3, foretold)
    compare(steps, eager, graphed, 39, num_drafts=2)
    assert graphs.better_keys() is None  # too few steps to tell
    compare(steps, eager, graphed, 1, num_drafts=2)
    num_in_40_steps = graphs.counts.num_padding_tokens
    keys = graphs.better_keys()
    assert keys is not None
    assert graphs.better_keys() is None  # not before there are twice as many
    assert keys.num_padding_tokens(graphs.shapes) < KEYS.num_padding_tokens(graphs.shapes)

    graphs.forget(again := RecordingPool(), keys)
    num_captures = len(pool.num_graphs)
    compare(steps, eager, graphed, 10, num_drafts=2, between=graphs.capture_next)
    graphs.capture_all()
    assert graphs.captured == keys.capture_order()  # the largest first
    assert len(again.num_graphs) == num_captures == len(pool.num_graphs)
    counts = graphs.counts
    num_before, num_full = counts.num_padding_tokens, counts.num_full
    compare(steps, eager, graphed, 40, num_drafts=2)
    assert counts.num_full - num_full > 20
    assert counts.num_padding_tokens - num_before < num_in_40_steps / 2
    assert again.num_replays > 20


def test_keys_that_pad_hardly_less_are_not_worth_capturing(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_FIRST_STEPS", 100)
    graphs, _ = graphs_of(small_forward, GraphKeys((), {1: (1, 4, 32)}))
    for num_requests, count in ((4, 95), (3, 4), (1, 1)):
        for _ in range(count):
            graphs.context.backend.plan(decode_step(num_requests))
    graphs.capture_all()
    assert graphs.better_keys() is None


def test_a_weight_that_moves_after_the_capture_is_noticed(tmp_path):
    loaded = load(make_checkpoint(tmp_path / "m"))
    runner = make_runner(loaded)
    graphs, _ = add_graphs(loaded, runner, PIECEWISE_ONLY)
    graphs.capture_all()
    weight = loaded.model.norm.weight
    weight.data = weight.data.clone()
    with pytest.raises(AssertionError, match="reads what has moved"), torch.inference_mode():
        runner.forward(make_steps(loaded, 0).plan(8))


class Doubling(AttentionBackend):
    """Attention that doubles q."""

    name = "doubling"

    @classmethod
    def unsupported_reason(cls, spec: LayerKVSpec, device: torch.device) -> str | None:
        return None

    def kv_cache_shape(self, spec: LayerKVSpec, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks,)

    def plan(self, metadata: AttentionMetadata) -> None:
        self.metadata = metadata

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        torch.mul(q, 2, out=out)


def graphs_of(forward: ForwardFn, keys: GraphKeys) -> tuple[CudaGraphs, Doubling]:
    backend = Doubling(4, 1.0)
    context = ForwardContext(backend, [torch.zeros(8)])
    graphs = CudaGraphs(forward, context, keys, RecordingPool(), device=CPU, max_model_len=32)
    return graphs, backend


def decode_step(num_requests: int) -> AttentionMetadata:
    return AttentionMetadata(
        num_requests=num_requests,
        num_tokens=num_requests,
        max_query_len=1,
        max_seq_len=9,
        num_decode_requests=num_requests,
        query_start_loc=np.arange(num_requests + 1, dtype=np.int32),
        seq_lens=np.full(num_requests, 9, np.int32),
        block_table=torch.arange(num_requests * 3, dtype=torch.int32).view(num_requests, 3) + 5,
        slot_mapping=torch.arange(num_requests) + 40,
    )


def run(graphs: CudaGraphs, num_tokens: int) -> Tensor:
    graphs.context.backend.plan(decode_step(num_tokens))
    with torch.inference_mode(), forward_context(graphs.context):
        rows = torch.arange(num_tokens)
        return graphs(rows.int(), rows, rows)


def small_forward(input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    q = (input_ids + positions).double().view(-1, 1, 1)
    return attention(q, q, q, 0).flatten(1)[rows] + 1


def test_padding_tokens_have_no_slot_and_padding_requests_no_block_but_the_first():
    keys = GraphKeys((8,), {1: (4,)})
    graphs, backend = graphs_of(small_forward, keys)
    graphs.capture_all()
    assert torch.equal(run(graphs, 4), torch.tensor([[1.0], [5.0], [9.0], [13.0]]).double())
    run(graphs, 2)
    planned = backend.metadata
    assert (planned.num_requests, planned.num_tokens, planned.num_decode_requests) == (4, 4, 4)
    assert planned.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert planned.seq_lens.tolist() == [9, 9, 1, 1]
    assert planned.max_seq_len == 32
    assert planned.slot_mapping.tolist() == [40, 41, -1, -1]
    assert planned.block_table.shape == (4, 8)
    assert planned.block_table[:2, :3].tolist() == [[5, 6, 7], [8, 9, 10]]
    assert not planned.block_table[2:].any()
    run(graphs, 5)
    planned = backend.metadata
    assert (planned.num_requests, planned.num_tokens) == (5, 5)  # attention runs as ever
    assert planned.slot_mapping.tolist() == [40, 41, 42, 43, 44, -1, -1, -1]


def test_a_full_step_is_planned_with_the_same_tensors_every_time():
    graphs, backend = graphs_of(small_forward, GraphKeys((), {1: (4,)}))
    graphs.capture_all()
    places = set()
    for num_requests in (4, 1, 3):
        run(graphs, num_requests)
        planned = backend.metadata
        places.add((planned.block_table.data_ptr(), planned.slot_mapping.data_ptr()))
    assert len(places) == 1


def test_a_forward_that_reads_the_device_on_the_host_is_left_out_and_runs_eagerly(caplog):
    def forward(input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return small_forward(input_ids, positions, rows) * int(positions.max())

    graphs, _ = graphs_of(forward, GraphKeys((4,)))
    with caplog.at_level("WARNING", logger="nano"):
        graphs.capture_all()
    assert "no graph for piecewise 4: item: the host reads" in caplog.text
    assert graphs.captured == []
    assert run(graphs, 3).flatten().tolist() == [2.0, 10.0, 18.0]
    assert graphs.counts.eager == {"not captured: piecewise 4": 1}


def test_after_a_capture_that_failed_others_succeed():
    def forward(input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        if len(input_ids) == 8:
            raise RuntimeError("out of memory")
        return small_forward(input_ids, positions, rows)

    graphs, _ = graphs_of(forward, GraphKeys((4, 8)))
    graphs.capture_all()
    assert graphs.captured == [GraphKey(4)]
    assert run(graphs, 3).flatten().tolist() == [1.0, 5.0, 9.0]


def test_tokens_of_another_step_than_the_planned_are_refused():
    graphs, _ = graphs_of(small_forward, GraphKeys((4,)))
    graphs.capture_all()
    graphs.context.backend.plan(decode_step(3))
    with pytest.raises(AssertionError, match="another step"), forward_context(graphs.context):
        graphs(torch.zeros(2, dtype=torch.int32), *[torch.zeros(2, dtype=torch.int64)] * 2)
