"""Engines with compiled pieces: what they compute, what they keep, and what can go wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nano import LLM, SamplingParams
from nano.compile import compile_model
from nano.compile.artifact import digest_of
from nano.compile.compile_model import CompiledModel
from nano.compile.request import CompileRequest
from nano.layers.native_kernels import NativeKernels
from tests.compile.conftest import ENGINE_ARGS, Compiled, artifacts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler"),
]

REQUESTS = [
    (
        list(range(i, i + length)),
        SamplingParams(
            seed=i, temperature=0.8 * (i % 2), max_tokens=12, logprobs=2 * (i % 3), ignore_eos=True
        ),
    )
    for i, length in enumerate((1, 2, 3, 5, 7, 16, 17, 33, 64, 65))
]


def generate(llm: LLM, some: list[tuple[list[int], SamplingParams]] = REQUESTS) -> list[Any]:
    outputs = llm.generate([p for p, _ in some], [s for _, s in some], use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def engine(checkpoint: Path, **args: Any) -> LLM:
    return LLM(checkpoint, **(ENGINE_ARGS | {"compile_mode": "compiled"} | args))


def model_forward(llm: LLM) -> CompiledModel:
    return llm._client._core._executor._worker.target.forward


@pytest.fixture(scope="module")
def golden(compiled: Compiled) -> list[Any]:
    """Every request alone, op by op."""
    with engine(compiled.checkpoint, compile_mode="eager", max_num_seqs=1) as llm:
        assert model_forward(llm).mode == "eager"
        return generate(llm)


class FakeCompiler:
    """In place of the child: `artifact` appears in `cache` at the given poll.

    Called like the class that it stands for, it is its own instance.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path, artifact: Path | None):
        self.num_started = self.num_polls = self.num_closed = 0
        self.finishes_at = 1
        self.status = 0
        self.is_background: bool | None = None
        self._store = cache / "nano" / "compiled"
        self._artifact = artifact
        monkeypatch.setattr(compile_model, "CompilerProcess", self)

    def __call__(self, request: CompileRequest, *, is_background: bool) -> "FakeCompiler":
        self.num_started += 1
        self.is_background = is_background
        return self

    def poll(self) -> int | None:
        self.num_polls += 1
        if self.num_polls < self.finishes_at:
            return None
        if self._artifact is not None:
            shutil.rmtree(self._store / self._artifact.name, ignore_errors=True)
            shutil.copytree(self._artifact, self._store / self._artifact.name)
        return self.status

    def last_words(self) -> str:
        return "error: the compiler is on strike"

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def without_pieces(own_cache: Path, compiled: Compiled) -> Path:
    shutil.rmtree(own_cache / "nano" / "compiled")
    return own_cache


def test_the_program_explains_what_it_made(compiled):
    for text in (
        "4 pieces between 3 calls of split ops",
        "piece_1: used 2 times",
        "num_layers = 3",
        "def piece_1(",
        "def run(input_ids, positions, rows):",
        'extern "C"  void  fused_',
        "kernels.so:",
    ):
        assert text in compiled.output, text
    assert len(compiled.artifacts) == 1


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"max_num_batched_tokens": 8, "block_size": 1},
        {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 9},
        {"max_num_seqs": 3, "threads": 1},
    ],
    ids=str,
)
def test_compiled_engines_give_the_bits_of_the_eager_one(own_cache, compiled, golden, shape):
    with engine(compiled.checkpoint, **shape) as llm:
        assert model_forward(llm).mode == "compiled"
        assert generate(llm) == golden
        # B109: one graph for every number of tokens and requests.
        for num_requests in range(1, 10):
            assert generate(llm, REQUESTS[:num_requests]) == golden[:num_requests]


def test_a_warm_engine_imports_neither_dynamo_nor_inductor_and_needs_no_compiler(
    own_cache, compiled
):
    program = (
        "import sys\n"
        "from nano import LLM, SamplingParams\n"
        f"llm = LLM({str(compiled.checkpoint)!r}, compile_mode='auto', **{ENGINE_ARGS})\n"
        "out = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)\n"
        "assert len(out[0].outputs[0].token_ids) == 4\n"
        "print(llm._client._core._executor._worker.target.forward.mode)\n"
        "print([m for m in sys.modules if m.startswith(('torch._dynamo', 'torch._inductor'))])\n"
    )
    environment = os.environ | {
        "CXX": "/bin/false",
        "PATH": "/nowhere",
        "NANO_COMPILE_MODE": "auto",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["compiled", "[]"], done.stderr


@pytest.mark.parametrize("change", ["seed", "copy", "served elsewhere", "block size"])
def test_a_second_start_finds_what_the_first_one_made(  # B111
    own_cache, compiled, tmp_path, monkeypatch, change
):
    compiler = FakeCompiler(monkeypatch, own_cache, None)
    checkpoint, args = compiled.checkpoint, {}
    match change:
        case "seed":
            args = {"seed": 5, "max_num_seqs": 7, "max_num_batched_tokens": 32}
        case "copy":
            checkpoint = shutil.copytree(checkpoint, tmp_path / "elsewhere")
        case "served elsewhere":
            monkeypatch.chdir(tmp_path)
        case "block size":
            args = {"block_size": 4, "kv_cache_dtype": "bfloat16"}
    before = artifacts(own_cache)
    for _ in range(2):
        with engine(checkpoint, **args) as llm:
            assert model_forward(llm).mode == "compiled"
    assert artifacts(own_cache) == before
    assert compiler.num_started == 0


def test_another_model_at_the_same_path_has_pieces_of_its_own_and_the_log_says_why(
    own_cache, compiled, tmp_path, monkeypatch, caplog
):
    compiler = FakeCompiler(monkeypatch, own_cache, None)
    compiler.finishes_at = 10**9
    checkpoint = shutil.copytree(compiled.checkpoint, tmp_path / "changed")
    config = (checkpoint / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06' in config
    (checkpoint / "config.json").write_text(config.replace("1e-06", "1e-03"))
    with caplog.at_level("INFO", logger="nano"), engine(checkpoint) as llm:
        assert model_forward(llm).mode == "eager"
        assert generate(llm, REQUESTS[:1])
    assert compiler.num_started == 1
    assert "the nearest differ in modules\n" in caplog.text
    caplog.clear()
    monkeypatch.setattr("nano.compile.request.cpu_flags", lambda: ("-march=native", "-O3"))
    with caplog.at_level("INFO", logger="nano"), engine(compiled.checkpoint):
        pass
    assert "the nearest differ in cpu_flags (-march=native, now -march=native -O3)" in caplog.text


def test_eager_first_serves_at_once_and_swaps_in_the_middle_of_requests(
    without_pieces, compiled, golden, monkeypatch
):
    compiler = FakeCompiler(monkeypatch, without_pieces, compiled.artifacts[0])
    compiler.finishes_at = 6
    modes = []
    with engine(compiled.checkpoint, startup="eager-first", max_num_seqs=3) as llm:
        forward = model_forward(llm)
        step = llm._client._core.step

        def watched() -> Any:
            modes.append(forward.mode)
            return step()

        monkeypatch.setattr(llm._client._core, "step", watched)
        assert generate(llm) == golden
        first = modes.index("compiled")
        assert 8 < first < len(modes) - 2, "not in the middle"
        assert set(modes[first:]) == {"compiled"}
        assert generate(llm) == golden  # over blocks that were computed before the swap
    assert (compiler.num_started, compiler.num_closed) == (1, 1)
    assert compiler.is_background


def test_an_idle_engine_swaps_as_well(without_pieces, compiled, golden, monkeypatch):
    compiler = FakeCompiler(monkeypatch, without_pieces, compiled.artifacts[0])
    compiler.finishes_at = 3
    with engine(compiled.checkpoint) as llm:
        for _ in range(20):
            llm._client._core.idle()
        assert model_forward(llm).mode == "compiled"
        assert generate(llm) == golden


def test_compiled_first_waits(without_pieces, compiled, golden, monkeypatch):
    compiler = FakeCompiler(monkeypatch, without_pieces, compiled.artifacts[0])
    compiler.finishes_at = 4
    with engine(compiled.checkpoint, startup="compiled-first") as llm:
        assert model_forward(llm).mode == "compiled"
        assert generate(llm) == golden
    assert not compiler.is_background


def test_closing_ends_the_compiling_child(without_pieces, compiled, monkeypatch):
    compiler = FakeCompiler(monkeypatch, without_pieces, None)
    compiler.finishes_at = 10**9
    with engine(compiled.checkpoint):
        pass
    assert (compiler.num_started, compiler.num_closed) == (1, 1)


def test_a_failed_compilation_is_told_in_one_line_and_eager_serves_on(
    without_pieces, compiled, golden, monkeypatch, caplog
):
    compiler = FakeCompiler(monkeypatch, without_pieces, None)
    compiler.status = 1
    with engine(compiled.checkpoint) as llm:
        assert generate(llm) == golden
        assert model_forward(llm).mode == "eager"
    assert caplog.text.count("on strike") == 1
    assert compiler.num_started == 1


@pytest.mark.parametrize("file", ["manifest.json", "pieces.py", "kernels.so", "kernels.cpp"])
@pytest.mark.parametrize("damage", ["half", "empty", "gone", "another"])
def test_a_damaged_artifact_is_put_aside_and_made_anew(  # B108
    own_cache, compiled, golden, monkeypatch, caplog, file, damage
):
    compiler = FakeCompiler(monkeypatch, own_cache, compiled.artifacts[0])
    (folder,) = artifacts(own_cache)
    data = (folder / file).read_bytes()
    match damage:
        case "half":
            (folder / file).write_bytes(data[: len(data) // 2])
        case "empty":
            (folder / file).write_bytes(b"")
        case "gone":
            (folder / file).unlink()
        case "another":
            (folder / file).write_bytes(b"[]")
    with engine(compiled.checkpoint) as llm:
        assert generate(llm) == golden
        assert model_forward(llm).mode == "compiled"
    assert compiler.num_started == 1
    if (file, damage) != ("manifest.json", "gone"):  # that is no artifact at all
        assert caplog.text.count("are not used") == 1
        assert (folder.parent / f"{folder.name}.bad").exists()


def spoil(folder: Path) -> None:
    """Make pieces compute something else, as a miscompilation would: nothing looks damaged."""
    pieces = folder / "pieces.py"
    source = pieces.read_text()
    pieces.write_text(source.replace("    return v", "    return 1.0000001 * v"))
    assert pieces.read_text() != source
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["digests"]["pieces.py"] = digest_of(pieces)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_pieces_that_are_wrong_by_a_bit_are_put_aside_and_made_anew(
    own_cache, compiled, golden, monkeypatch, caplog
):
    compiler = FakeCompiler(monkeypatch, own_cache, compiled.artifacts[0])
    (folder,) = artifacts(own_cache)
    spoil(folder)
    with engine(compiled.checkpoint) as llm:
        assert generate(llm) == golden
        assert model_forward(llm).mode == "compiled"
    assert compiler.num_started == 1
    assert "another result than the eager model's" in caplog.text


def test_pieces_that_are_wrong_twice_leave_the_engine_eager_with_one_error(
    own_cache, compiled, golden, monkeypatch, caplog, tmp_path
):
    (folder,) = artifacts(own_cache)
    spoil(folder)
    compiler = FakeCompiler(
        monkeypatch, own_cache, shutil.copytree(folder, tmp_path / "spoilt" / folder.name)
    )
    with engine(compiled.checkpoint) as llm:
        assert generate(llm) == golden
        assert model_forward(llm).mode == "eager"
    assert compiler.num_started == 1
    (error,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "pieces compiled anew were no better" in error.getMessage()
    assert artifacts(own_cache) == [folder.parent / f"{folder.name}.bad"]


def test_pieces_that_raise_or_do_not_load_are_put_aside(own_cache, compiled, monkeypatch, caplog):
    compiler = FakeCompiler(monkeypatch, own_cache, compiled.artifacts[0])
    (folder,) = artifacts(own_cache)
    spoil(folder)
    for source in ("def run(*inputs):\n    raise KeyError('w7')\n", "def run(:\n"):
        (folder / "pieces.py").write_text(source + "    return v\n")
        spoil(folder)
        with engine(compiled.checkpoint) as llm:
            generate(llm, REQUESTS[:1])
            assert model_forward(llm).mode == "compiled"
    assert compiler.num_started == 2
    assert "KeyError" in caplog.text
    assert "SyntaxError" in caplog.text


def test_without_a_compiler_or_pieces_auto_is_eager_with_one_line(  # B110
    without_pieces, compiled, golden, monkeypatch, caplog
):
    monkeypatch.setattr(compile_model, "compiler", lambda: None)
    with engine(compiled.checkpoint) as llm:
        assert generate(llm) == golden
        assert model_forward(llm).mode == "eager"
    assert caplog.text.count("no C++ compiler was found") == 1


def test_without_a_place_for_a_cache_an_engine_is_eager_with_one_warning(  # B108
    without_pieces, compiled, golden, monkeypatch, caplog
):
    (without_pieces / "nano" / "compiled").write_text("in the way")
    with engine(compiled.checkpoint) as llm:
        assert generate(llm) == golden
        assert model_forward(llm).mode == "eager"
    assert caplog.text.count("cannot be written to") == 1


def test_without_a_home_an_engine_is_eager_with_one_warning(  # B108
    own_cache, compiled, golden, monkeypatch, caplog
):
    monkeypatch.setattr("nano.compile.store.ArtifactStore.default", lambda: None)
    with engine(compiled.checkpoint) as llm:
        assert generate(llm) == golden
        assert model_forward(llm).mode == "eager"
    assert caplog.text.count("no home folder") == 1


def test_without_a_compiler_and_with_empty_caches_everything_works_eagerly(  # B110
    compiled, tmp_path
):
    program = (
        "from nano import LLM, SamplingParams\n"
        f"llm = LLM({str(compiled.checkpoint)!r}, compile_mode='auto', **{ENGINE_ARGS})\n"
        "params = [SamplingParams(temperature=t, seed=1, max_tokens=4) for t in (0.0, 0.8)]\n"
        "out = llm.generate([[1, 2, 3]] * 2, params, use_tqdm=False)\n"
        "print([len(o.outputs[0].token_ids) for o in out])\n"
    )
    environment = os.environ | {
        "CXX": "/bin/false",
        "PATH": "/nowhere",
        "NANO_COMPILE_MODE": "auto",
        "XDG_CACHE_HOME": str(tmp_path / "empty"),
        "TORCHINDUCTOR_CACHE_DIR": "/proc/x",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "[4, 4]\n", done.stderr
    assert done.stderr.count("compile mode: eager") == 1
    assert "Traceback" not in done.stderr


def test_stored_pieces_serve_from_a_place_that_cannot_be_written_to(
    own_cache, compiled, golden, monkeypatch
):
    monkeypatch.setattr(
        "nano.compile.store.ArtifactStore.unwritable_reason", lambda self: "read-only"
    )
    with engine(compiled.checkpoint) as llm:
        assert model_forward(llm).mode == "compiled"
        assert generate(llm) == golden


def test_whatever_goes_wrong_on_the_side_the_engine_serves_on(
    own_cache, compiled, golden, monkeypatch, caplog
):
    def no_memory(self, forward, num_tokens):
        raise MemoryError("no room for a probe")

    monkeypatch.setattr("nano.worker.step_probe.StepProbe.hidden", no_memory)
    with engine(compiled.checkpoint) as llm:
        assert model_forward(llm).mode == "eager"
        assert generate(llm) == golden
    assert caplog.text.count("no room for a probe") == 1


def test_a_core_in_its_own_process_uses_them_too(own_cache, compiled, golden):
    with engine(compiled.checkpoint, use_subprocess=True) as llm:
        assert generate(llm) == golden


def test_quantised_models_are_compiled_as_well(own_cache, compiled):
    results = []
    for args in ({"compile_mode": "eager"}, {"startup": "compiled-first"}):
        with engine(compiled.checkpoint, quantization="int8", **args) as llm:
            results.append((model_forward(llm).mode, generate(llm)))
    (eager, expected), (pieces, result) = results
    assert (eager, pieces) == ("eager", "compiled")
    assert result == expected


def test_ten_thousand_steps_grow_no_memory(own_cache, compiled):
    with engine(compiled.checkpoint, max_num_batched_tokens=32) as llm:
        while llm.stats()["num_steps"] < 2_000:
            generate(llm)
        before = resident_bytes()
        while llm.stats()["num_steps"] < 12_000:
            generate(llm)
        assert resident_bytes() - before < 4 * 2**20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
