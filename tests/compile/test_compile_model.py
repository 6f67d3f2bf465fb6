"""When compiled pieces are used that agree with the eager model on bits, and such that do not.

Without a compiler: the model is a function, and its pieces another.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nano.compile import compile_model
from nano.compile.artifact import ForwardFn
from nano.compile.compile_model import CompiledModel, CompileTarget
from nano.compile.request import CompileRequest
from nano.compile.store import ArtifactStore


class Eager(nn.Module):
    def forward(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return (input_ids + positions)[rows].to(self.dtype)

    dtype = torch.float32


class Compiler:
    """In place of the child: done at the given poll, and then `key` is stored."""

    def __init__(self, store: ArtifactStore, num_polls: int):
        self._store = store
        self._num_polls = num_polls
        self.is_background: bool | None = None

    def __call__(self, request: CompileRequest, *, is_background: bool) -> "Compiler":
        self.is_background = is_background
        self._key = request.key
        return self

    def poll(self) -> int | None:
        self._num_polls -= 1
        if self._num_polls > 0:
            return None
        keep(self._store, self._key)
        return 0

    def close(self) -> None:
        pass


def keep(store: ArtifactStore, key: str) -> None:
    with store.building(key) as folder:
        if folder is not None:
            (folder / "manifest.json").write_text("{}")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    monkeypatch.setattr(compile_model, "compiler", lambda: "c++")
    return ArtifactStore(tmp_path)


def make(
    store: ArtifactStore,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_exact: bool,
    device: str = "cpu",
    model: Eager | None = None,
    error: float = 0.0,
) -> CompiledModel:
    """Its pieces are off by `error`, of the largest number that there is."""
    model = model or Eager()

    def load(folder: Path, *_: Any) -> Iterator[ForwardFn | None]:
        yield None
        yield lambda *inputs: model(*inputs) * (1 + error)

    def probe(forward: ForwardFn, num_tokens: int) -> Tensor:
        rows = torch.arange(num_tokens)
        return forward(rows, rows + 5, rows)

    monkeypatch.setattr(compile_model, "load", load)
    request = CompileRequest({}, {}, (), b"", device, {"gpu": "H100"} if device != "cpu" else {})
    return CompiledModel(CompileTarget(model, request, {}, probe, is_exact), store)


def drain(forward: CompiledModel, most: int = 100) -> None:
    while forward.poll() is not None:
        most -= 1
        assert most > 0


def test_pieces_that_agree_on_bits_come_while_requests_run(store, monkeypatch):
    compiler = Compiler(store, 5)
    monkeypatch.setattr(compile_model, "CompilerProcess", compiler)
    forward = make(store, monkeypatch, is_exact=True)
    forward.prepare("auto", "auto")
    assert forward.mode == "eager"
    drain(forward)
    assert forward.mode == "compiled"
    assert compiler.is_background


@pytest.mark.parametrize("mode", ["auto", "compiled"])
def test_a_gpu_waits_for_its_pieces_and_uses_none_that_come_later(store, monkeypatch, mode):
    compiler = Compiler(store, 5)
    monkeypatch.setattr(compile_model, "CompilerProcess", compiler)
    forward = make(store, monkeypatch, is_exact=False, device="cuda:0", error=1e-5)
    forward.prepare(mode, "auto")
    assert forward.mode == "compiled"
    assert not compiler.is_background


def test_eager_first_on_a_gpu_compiles_on_the_side_for_the_next_start(store, monkeypatch, caplog):
    compiler = Compiler(store, 5)
    monkeypatch.setattr(compile_model, "CompilerProcess", compiler)
    forward = make(store, monkeypatch, is_exact=False, device="cuda:0", error=1e-5)
    forward.prepare("auto", "eager-first")
    with caplog.at_level("INFO", logger="nano"):
        drain(forward)
    assert forward.mode == "eager"  # a request ends in the numerics it began in
    assert compiler.is_background
    assert "for the next start" in caplog.text
    assert store.find(forward.key) is not None
    again = make(store, monkeypatch, is_exact=False, device="cuda:0", error=1e-5)
    again.prepare("auto", "eager-first")
    assert again.mode == "compiled"


def test_on_a_cpu_pieces_that_do_not_agree_on_bits_must_be_asked_for(store, monkeypatch):
    monkeypatch.setattr(compile_model, "CompilerProcess", Compiler(store, 2))
    forward = make(store, monkeypatch, is_exact=False)
    forward.prepare("auto", "auto")
    assert forward.mode == "eager"
    forward.prepare("compiled", "auto")
    assert forward.mode == "compiled"


@pytest.mark.parametrize(
    ("dtype", "error", "mode"),
    [
        (torch.float32, 5e-4, "compiled"),
        (torch.float32, 5e-3, "eager"),
        (torch.bfloat16, 2e-2, "compiled"),
        (torch.bfloat16, 2e-1, "eager"),
    ],
)
def test_what_counts_as_rounding_depends_on_the_dtype(store, monkeypatch, dtype, error, mode):
    monkeypatch.setattr(compile_model, "CompilerProcess", Compiler(store, 1))
    model = Eager()
    model.dtype = dtype
    forward = make(store, monkeypatch, is_exact=False, device="cuda:0", model=model, error=error)
    forward.prepare("auto", "auto")
    assert forward.mode == mode


def test_without_triton_a_gpu_is_eager_in_one_line(store, monkeypatch, caplog):
    monkeypatch.setattr(compile_model, "find_spec", lambda name: None)
    forward = make(store, monkeypatch, is_exact=False, device="cuda:0")
    forward.prepare("auto", "auto")
    assert forward.mode == "eager"
    assert caplog.text.count("Triton is not installed") == 1


def test_pieces_are_kept_for_the_gpu_they_were_written_for():
    traits = {"gpu": "H100", "capability": "9.0", "triton": "3.7.1"}
    requests = [
        CompileRequest({}, {}, (), b""),
        CompileRequest({}, {}, (), b"", "cuda:0", traits),
        CompileRequest({}, {}, (), b"", "cuda:1", traits),  # its number is in the code
        CompileRequest({}, {}, (), b"", "cuda:0", traits | {"triton": "3.8.0"}),
        CompileRequest({}, {}, (), b"", "cuda:0", traits | {"gpu": "B200", "capability": "10.0"}),
    ]
    assert len({request.key for request in requests}) == 5
    assert [request.form for request in requests] == ["source"] + ["bundle"] * 4
    assert "cpu" not in requests[1].factors
    file = io.BytesIO()  # as the child gets it
    requests[1].write(file)
    file.seek(0)
    assert CompileRequest.read(file) == requests[1]
