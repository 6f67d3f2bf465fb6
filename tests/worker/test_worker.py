"""What the worker measures and allocates, and a step whose logits come in pieces."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from nano import LLM, SamplingParams
from nano.attention.cpu_backend import CpuBackend
from nano.attention.reference_backend import ReferenceBackend
from nano.config import EngineConfig
from nano.errors import ConfigError
from nano.resolve import resolve
from nano.worker import model_runner
from nano.worker.worker import Worker, WorkerInfo, numerics_id
from tests.tiny import make_checkpoint

BYTES_PER_BLOCK = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, tokens, heads, head_dim, float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("worker"))


def load(checkpoint: Path, **engine_args) -> WorkerInfo:
    config = resolve(EngineConfig.from_args({"model": str(checkpoint), **engine_args}))
    return Worker(config).load(show_progress=False)


def test_the_number_of_blocks_is_as_told(checkpoint):
    info = load(checkpoint, num_gpu_blocks_override=7)
    assert info.kv_cache.num_blocks == 7
    assert info.kv_cache.bytes_per_block == BYTES_PER_BLOCK


def test_the_number_of_blocks_fits_the_bytes(checkpoint):
    info = load(checkpoint, kv_cache_memory_bytes=10 * BYTES_PER_BLOCK + BYTES_PER_BLOCK // 2)
    assert info.kv_cache.num_blocks == 10
    with pytest.raises(ConfigError, match=f"no room for one block of {BYTES_PER_BLOCK} bytes"):
        load(checkpoint, kv_cache_memory_bytes=BYTES_PER_BLOCK - 1)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_gpu_blocks_override": 10**12},
        {"block_size": 10**12},
        {"max_num_batched_tokens": 10**13, "num_gpu_blocks_override": 4},
        {"max_num_batched_tokens": 10**11, "max_num_seqs": 10**11, "num_gpu_blocks_override": 4},
    ],
    ids=str,
)
def test_sizes_that_no_memory_holds_are_refused_with_the_numbers(checkpoint, sizes):
    with pytest.raises(ConfigError, match=f"no memory for .*{max(sizes.values())}"):
        load(checkpoint, **sizes)


def test_a_worker_whose_load_failed_can_be_closed(checkpoint, tmp_path):
    other = make_checkpoint(tmp_path / "other", vocab_size=1024)
    for given in (
        {"attention_backend": "triton"},  # before there is a model
        {"speculative_config": {"model": str(other), "num_speculative_tokens": 2}},  # after
    ):
        worker = Worker(resolve(EngineConfig.from_args({"model": str(checkpoint), **given})))
        with pytest.raises(ConfigError):
            worker.load(show_progress=False)
        worker.close()


def test_without_a_limit_the_cache_is_a_share_of_free_memory_but_no_more_than_useful(
    checkpoint, caplog, monkeypatch
):
    with caplog.at_level("INFO", logger="nano"):
        info = load(checkpoint, max_num_seqs=3, max_num_batched_tokens=64)
    assert info.kv_cache.num_blocks == 3 * 512 // 16
    assert "40% of" in caplog.text
    monkeypatch.setattr("nano.device.CpuDevice.free_memory", lambda self: 80 * BYTES_PER_BLOCK)
    assert load(checkpoint, gpu_memory_utilization=0.25).kv_cache.num_blocks == 20


def test_the_token_budget_is_measured_and_logged_unless_told(checkpoint, caplog):
    with caplog.at_level("INFO", logger="nano"):
        info = load(checkpoint, num_gpu_blocks_override=64)
    assert info.token_budget % 16 == 0
    assert 16 <= info.token_budget <= 8192
    assert f"max_num_batched_tokens: {info.token_budget} (measured" in caplog.text
    assert info.step_seconds <= 0.5
    assert load(checkpoint, max_num_batched_tokens=100).token_budget == 100


def test_every_running_request_has_room_in_the_budget(checkpoint):
    info = load(checkpoint, max_num_batched_tokens=5, max_num_seqs=64, num_gpu_blocks_override=64)
    assert info.max_num_requests == 5


def test_the_numerics_id_names_weights_dtype_storage_and_kernels(checkpoint, tmp_path):
    config = resolve(EngineConfig.from_args({"model": str(checkpoint)}))
    backend = CpuBackend(16, 0.25)

    def identify(
        config=config, backend=backend, kernels="native", storage="15 bfloat16", gpu=""
    ) -> str:
        return numerics_id(config, backend, kernels, storage, {"gpu": gpu} if gpu else {})

    def having(**options) -> EngineConfig:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, **options))

    shutil.copytree(checkpoint, tmp_path / "copy")
    other = make_checkpoint(tmp_path / "other", seed=1)
    assert identify() == identify(having(path=str(tmp_path / "copy")))
    different = {
        identify(),
        identify(having(path=str(other))),
        identify(having(dtype="float64")),
        identify(backend=ReferenceBackend(16, 0.25)),
        identify(kernels="torch"),
        identify(storage="14 int8, 1 bfloat16"),
        identify(gpu="H200"),
        identify(gpu="H100"),
    }
    assert len(different) == 8


def test_dummy_weights_run(checkpoint):
    with LLM(checkpoint, load_format="dummy", max_num_batched_tokens=64) as llm:
        output = llm.generate("abc", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output[0].outputs[0].token_ids) == 3


def test_logits_in_pieces_of_any_size_give_the_same_tokens_and_logprobs(checkpoint, monkeypatch):
    params = SamplingParams(
        temperature=0.9, seed=4, max_tokens=5, logprobs=2, prompt_logprobs=3, ignore_eos=True
    )
    results = []
    for num_rows in (1000, 3, 1):
        monkeypatch.setattr(model_runner, "_MAX_LOGITS_BYTES", num_rows * 260 * 8)
        with LLM(checkpoint, dtype="float64", max_num_batched_tokens=128) as llm:
            outputs = llm.generate(["one", "a second prompt", "x"], params, use_tqdm=False)
        results.append(outputs)
    for outputs in results[1:]:
        for output, whole in zip(outputs, results[0]):
            assert output.outputs[0].token_ids == whole.outputs[0].token_ids
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
            for ours, expected in zip(output.prompt_logprobs[1:], whole.prompt_logprobs[1:]):
                assert list(ours) == list(expected)
                for token_id in expected:
                    assert ours[token_id].logprob == pytest.approx(expected[token_id].logprob)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),  # a prompt of 40 in chunks of 16, and two tokens more
        ({"prompt_logprobs": 0}, [17, 17, 8, 1, 1]),  # the last row of a chunk twice
    ],
    ids=["sampled", "prompt logprobs"],
)
def test_the_end_of_the_last_layer_sees_the_rows_that_somebody_reads(checkpoint, params, expected):
    args = {"max_num_batched_tokens": 16, "compile_mode": "eager", "max_model_len": 64}
    with LLM(checkpoint, **args) as llm:
        model = llm._client._core._executor._worker.target.model
        num_rows: list[int] = []
        model.layers[-1].mlp.register_forward_hook(
            lambda module, args, out: num_rows.append(len(args[0]))
        )
        llm.generate([[5] * 40], SamplingParams(max_tokens=3, **params), use_tqdm=False)
    assert num_rows == expected
