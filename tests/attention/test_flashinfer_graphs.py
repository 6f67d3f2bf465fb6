"""A model run through graphs over FlashInfer equals the same model run eagerly, bit for bit.

FlashInfer is its torch model here, and the graphs are recorded ones: both are strict about what the
real ones would not notice. The model computes in float32 on our kernels, whose bits do not depend
on padding; only attention is in bfloat16.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, AttentionSetup
from nano.attention.flashinfer_backend import FlashInferBackend
from nano.attention.op import ForwardContext
from nano.attention.reference_backend import ReferenceBackend
from nano.compile.cuda_graphs import CudaGraphs
from nano.compile.graph_keys import GraphKeys
from nano.config import EngineConfig
from nano.device import CpuDevice
from nano.device.recording_graph import RecordingPool
from nano.layers.native_kernels import NativeKernels
from nano.resolve import resolve
from nano.spec.proposers import Proposers
from nano.worker.loaded_model import LoadedModel
from nano.worker.model_runner import ModelRunner
from tests.attention.flashinfer_launches import LaunchingRuntime
from tests.compile.random_steps import RandomSteps
from tests.tiny import VOCAB_SIZE, make_checkpoint

CPU = torch.device("cpu")
MAX_MODEL_LEN, NUM_REQUESTS, BUDGET, BLOCK_SIZE = 64, 6, 40, 16
KEYS = GraphKeys((1, 4, 16, 32), {1: (1, 2, 4, 6), 3: (1, 4, 6)})

pytestmark = pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")


class InBfloat16(FlashInferBackend):
    """FlashInfer for a model that computes in float32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        rounded = torch.empty_like(out, dtype=torch.bfloat16)
        super().forward(q.bfloat16(), k.bfloat16(), v.bfloat16(), kv_cache, rounded)
        num_tokens = self._tokens.shape[1]
        out[:num_tokens].copy_(rounded[:num_tokens])


class ReferenceInBfloat16(ReferenceBackend):
    """Textbook attention, rounded where the other is."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: Tensor, out: Tensor) -> None:
        q, k, v = (x.bfloat16().float() for x in (q, k, v))
        super().forward(q, k, v, kv_cache, out)
        out.copy_(out.bfloat16())


@pytest.fixture(scope="module", params=["bfloat16", "fp8"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("graphs")
    args = {
        "model": str(make_checkpoint(folder, head_dim=64)),
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_dtype": request.param,
        "attention_backend": "reference",
        "compile_mode": "eager",
    }
    return LoadedModel(resolve(EngineConfig.from_args(args)), CpuDevice(), show_progress=False)


def make_runner(loaded: LoadedModel, backend: AttentionBackend) -> ModelRunner:
    num_blocks = NUM_REQUESTS * MAX_MODEL_LEN // BLOCK_SIZE
    runner = loaded.make_runner(Proposers(), num_blocks, NUM_REQUESTS, BUDGET)
    caches = []
    for layer in loaded.kv_layers:
        shape = backend.kv_cache_shape(layer, num_blocks)
        caches.append(torch.full(shape, torch.nan).to(getattr(torch, layer.dtype)))
    runner.context = ForwardContext(backend, caches)
    return runner


def make_steps(seed: int, foretold: dict[str, list[int]]) -> RandomSteps:
    return RandomSteps(
        seed,
        num_requests=NUM_REQUESTS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        foretold=foretold,
    )


def make_reference(loaded: LoadedModel) -> ModelRunner:
    return make_runner(loaded, ReferenceInBfloat16(BLOCK_SIZE, loaded.backend.scale))


@pytest.fixture(scope="module")
def foretold(loaded: LoadedModel) -> dict[str, list[int]]:
    """What the requests of random steps will say."""
    runner, steps = make_reference(loaded), make_steps(0, {})
    for _ in range(60):
        plan = steps.plan(BUDGET)
        steps.update(plan, runner.execute(plan))
    return steps.token_ids


@pytest.mark.parametrize("num_drafts", [None, 0, 2], ids=["any mix", "decode", "verification"])
@torch.inference_mode()
def test_a_model_in_graphs_equals_the_eager_one_and_the_reference(loaded, foretold, num_drafts):
    setup = AttentionSetup(BLOCK_SIZE, loaded.kv_layers[0], 4, torch.bfloat16, CPU)
    runtime = LaunchingRuntime()
    eager, graphed = (
        make_runner(loaded, InBfloat16(setup, each)) for each in (LaunchingRuntime(), runtime)
    )
    reference = make_reference(loaded)
    graphs = CudaGraphs(
        loaded.model.forward,
        graphed.context,
        KEYS,
        RecordingPool(),
        device=CPU,
        max_model_len=MAX_MODEL_LEN,
    )
    graphed.model_forward, graphed.context = graphs, graphs.context
    graphs.capture_all()
    assert graphs.captured == KEYS.capture_order()
    assert len(runtime.decoding) == 7  # one for each full graph
    places = buffer_places(runtime)

    steps = make_steps(1, foretold)
    for _ in range(30):
        plan = steps.plan(BUDGET, num_drafts)
        for runner in (reference, eager, graphed):
            runner.forward(plan)
        assert torch.equal(eager.hidden.view(torch.int32), graphed.hidden.view(torch.int32))
        torch.testing.assert_close(graphed.hidden, reference.hidden, rtol=0.01, atol=0.02)
        wanted, *outputs = (runner.sample() for runner in (reference, eager, graphed))
        assert [output.token_ids for output in outputs] == [wanted.token_ids] * 2
        steps.update(plan, wanted)
    assert (graphs.counts.num_full > 15) == (num_drafts is not None)
    assert graphs.counts.num_full + graphs.counts.num_piecewise > 20
    assert buffer_places(runtime) == places


def buffer_places(runtime: LaunchingRuntime) -> list[tuple[int, ...]]:
    return [tuple(x.data_ptr() for x in wrapper.buffers) for wrapper in runtime.decoding]
