"""An engine whose device has graphs and memory to measure: the CPU, with recorded graphs."""

from pathlib import Path

import pytest

from nano import LLM, SamplingParams
from nano.compile import cuda_graphs
from nano.compile.graph_keys import GraphKey
from nano.config import EngineConfig
from nano.device.recording_graph import RecordingCpu
from nano.errors import ConfigError
from nano.layers.native_kernels import NativeKernels
from nano.resolve import resolve
from nano.worker import worker
from nano.worker.worker import Worker
from tests.compile.random_steps import RandomSteps
from tests.tiny import VOCAB_SIZE, make_checkpoint

pytestmark = pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")

BYTES_PER_BLOCK = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, tokens, heads, head_dim, float32
SETTINGS = {
    "max_model_len": 128,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 4,
    "compile_mode": "eager",
    "generation_config": "vllm",
}
PROMPTS = [[5, 9, 9, 7], list(range(90)), [200]]
DRAFTING = {"method": "draft_model", "num_speculative_tokens": 3, "draft_length": "static"}


class Memory:
    """Of `total` bytes, whose free part is read from a script: at the start, before and after the
    weights, before and after the graphs."""

    def __init__(self, total: int, free: list[int], peak: int):
        self._total, self._free, self._peak = total, free, peak

    def total(self) -> int:
        return self._total

    def free(self) -> int:
        return self._free.pop(0)

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return self._peak

    def reset_peak(self) -> None:
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("draft"), num_hidden_layers=1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> RecordingCpu:
    """What every worker of the test computes on."""
    device = RecordingCpu()
    monkeypatch.setattr(worker, "make_device", lambda *_: device)
    return device


def generate(checkpoint: Path, *, max_tokens: int = 90, **args) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.7 * i, seed=i)
        for i in range(3)
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(checkpoint, **(SETTINGS | {"num_gpu_blocks_override": 64} | args)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def load(checkpoint: Path, **args) -> Worker:
    loaded = Worker(resolve(EngineConfig.from_args({"model": str(checkpoint), **SETTINGS, **args})))
    loaded.load(show_progress=False)
    return loaded


@pytest.mark.parametrize("startup", ["compiled-first", "eager-first"])
@pytest.mark.parametrize("is_speculating", [False, True], ids=["plain", "draft model"])
def test_an_engine_that_replays_graphs_says_what_an_eager_one_says(
    checkpoint, draft, monkeypatch, startup, is_speculating
):
    # One graph is captured per step, and the sizes of these requests come last: many steps, then.
    args = {"max_model_len": 512, "max_tokens": 300}
    args |= {"speculative_config": DRAFTING | {"model": str(draft)}} if is_speculating else {}
    expected = generate(checkpoint, **args)
    device = RecordingCpu()
    monkeypatch.setattr(worker, "make_device", lambda *_: device)
    assert generate(checkpoint, startup=startup, **args) == expected
    assert len(device.pools) == 1 + is_speculating
    for pool in device.pools:
        assert pool.num_replays > 0


def test_graphs_are_captured_before_the_first_step_or_between_steps(checkpoint, device):
    loaded = load(checkpoint, num_gpu_blocks_override=64)
    (graphs,) = loaded.target.graphs
    num_graphs = len(graphs.captured)
    assert num_graphs > 5
    loaded.idle()
    assert len(graphs.captured) == num_graphs
    loaded = load(checkpoint, num_gpu_blocks_override=64, startup="eager-first")
    (graphs,) = loaded.target.graphs
    assert len(graphs.captured) == 0
    for count in (1, 2):
        loaded.idle()
        assert len(graphs.captured) == count


def test_verification_has_graphs_of_each_length_or_of_the_longest_if_they_are_many(
    checkpoint, draft, device
):
    config = DRAFTING | {"model": str(draft)}
    loaded = load(checkpoint, num_gpu_blocks_override=64, speculative_config=config)
    (graphs,), (of_draft,) = loaded.target.graphs, loaded.speculation.loaded[0].graphs
    assert {key.query_len for key in graphs.captured if key.is_full} == {1, 2, 3, 4, 17}
    assert {key.query_len for key in of_draft.captured if key.is_full} == {1, 2}  # all right: two


def test_a_mode_that_is_asked_for_decides_what_is_captured(checkpoint, device):
    loaded = load(checkpoint, num_gpu_blocks_override=64, startup="eager-first")
    assert loaded.target.graphs
    for mode, has_pieces, has_full in (
        ("NONE", False, False),
        ("PIECEWISE", True, False),
        ("FULL_DECODE_ONLY", False, True),
    ):
        loaded.target.config = with_compile_options(checkpoint, cudagraph_mode=mode)
        loaded.target.graphs.clear()
        loaded.target.add_graphs(loaded.target.make_runner(None, 1, 1, 8).context, 8, 1)
        kinds = set()
        for graphs in loaded.target.graphs:
            graphs.capture_all()
            kinds |= {key.is_full for key in graphs.captured}
        assert kinds == {is_full for is_full in (False, True) if (has_pieces, has_full)[is_full]}


@pytest.mark.parametrize("sizes", [[], [4, 16]], ids=["of the load", "told"])
def test_an_idle_worker_exchanges_graphs_for_those_that_its_load_asks_for_unless_told(
    checkpoint, device, monkeypatch, sizes
):
    monkeypatch.setattr(cuda_graphs, "_FIRST_STEPS", 100)
    loaded = load(checkpoint, num_gpu_blocks_override=64)
    loaded.target.config = with_compile_options(checkpoint, cudagraph_capture_sizes=sizes)
    (graphs,) = loaded.target.graphs
    before = graphs.captured
    steps = RandomSteps(1, num_requests=3, max_model_len=128, block_size=16, vocab_size=VOCAB_SIZE)
    for _ in range(100):
        plan = steps.plan(40, num_drafts=0)
        steps.update(plan, loaded.execute(plan))
    loaded.idle()
    if sizes:
        assert graphs.captured == before
        return
    assert graphs.captured == []
    assert len(device.pools) == 2
    for _ in before:
        loaded.idle()
    assert len(graphs.captured) == len(before)
    assert set(graphs.captured) != set(before)


def test_sizes_that_are_told_are_captured_and_too_large_ones_left_out(checkpoint, device, caplog):
    loaded = load(checkpoint, num_gpu_blocks_override=64, startup="eager-first")
    loaded.target.config = with_compile_options(checkpoint, cudagraph_capture_sizes=[3, 12, 500])
    loaded.target.graphs.clear()
    context = loaded.target.make_runner(None, 1, 1, 40).context
    loaded.target.add_graphs(context, 40, 4)
    (graphs,) = loaded.target.graphs
    graphs.capture_all()
    assert graphs.captured == [GraphKey(12), GraphKey(3), GraphKey(3, 3)]
    assert "steps have 40 tokens at most; larger sizes are left out" in caplog.text


def with_compile_options(checkpoint: Path, **options) -> EngineConfig:
    """What a CPU would be refused."""
    config = resolve(EngineConfig.from_args({"model": str(checkpoint), **SETTINGS}))
    return EngineConfig.from_sections(
        config.to_sections() | {"compile": {"mode": "eager", **options}}
    )


def test_a_cpu_refuses_graphs(checkpoint):
    with pytest.raises(ConfigError, match="cudagraph_mode=FULL needs device=cuda"):
        load(checkpoint, cudagraph_mode="FULL")
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes=\(8,\) needs device=cuda"):
        load(checkpoint, cudagraph_capture_sizes=[8])
    assert load(checkpoint, num_gpu_blocks_override=9, cudagraph_mode="NONE").target.graphs == []


def test_the_cache_gets_what_weights_a_step_and_graphs_leave(checkpoint, device, caplog):
    total = 1000 * BYTES_PER_BLOCK
    free = [990, 980, 700, 690, 600]  # 10 are others', 280 the weights, 90 the graphs
    # 103 at once in a step, of which 3 are the blocks of the step itself: 40 tokens
    device.memory = Memory(total, [n * BYTES_PER_BLOCK for n in free], 103 * BYTES_PER_BLOCK)
    with caplog.at_level("INFO", logger="nano"):
        loaded = load(checkpoint, gpu_memory_utilization=0.5, startup="eager-first")
    assert loaded.runner.context.kv_caches[0].shape[0] == (1000 - 10 - 280 - 100 - 90) // 2
    assert "memory of cpu:\n  device" in caplog.text
    assert "KV cache (50% of it)" in caplog.text
    assert len(device.pools) == 2  # one was measured and dropped
    assert len(loaded.target.graphs) == 1
    assert device.pools[0].num_graphs
    assert not device.pools[1].num_graphs


def test_the_cache_leaves_room_for_what_a_draft_model_takes(checkpoint, draft, device, monkeypatch):
    total = 1000 * BYTES_PER_BLOCK
    # 280 are the weights of both, 90 the target's graphs and 40 those of the draft model, whose KV
    # has half as many layers.
    free = [990, 980, 700, 690, 600, 590, 550]
    device.memory = Memory(total, [n * BYTES_PER_BLOCK for n in free], 0)
    # At once in a step of the target, in a pass of the draft model, and to hold its logits.
    peaks = iter([103 * BYTES_PER_BLOCK, 50 * BYTES_PER_BLOCK, 160 * BYTES_PER_BLOCK])
    monkeypatch.setattr(device.memory, "peak", lambda: next(peaks))
    loaded = load(
        checkpoint,
        gpu_memory_utilization=0.5,
        startup="eager-first",
        speculative_config=DRAFTING | {"model": str(draft)},
    )
    num_blocks = loaded.runner.context.kv_caches[0].shape[0]
    assert num_blocks == (1000 - 10 - 280 - 160 - 90 - 40) // 2 * 2 // 3
    # Measured and dropped; one graph more than a model has layers, for each number of tokens.
    assert [max(pool.num_graphs) for pool in device.pools[:2]] == [3, 2]
    assert all(len(model.graphs) == 1 for model in (loaded.target, *loaded.speculation.loaded))


def test_weights_that_leave_no_block_are_refused_with_the_table(checkpoint, device):
    device.memory = Memory(1000 * BYTES_PER_BLOCK, [1000 * BYTES_PER_BLOCK] * 2 + [0] * 3, 0)
    with pytest.raises(ConfigError, match=r"no room for one block.*\n.*device") as error:
        load(checkpoint)
    assert "- weights" in str(error.value)
