"""Compiled pieces that come while graphs of the eager model serve: the graphs are captured anew.

Recorded graphs see what passes torch's dispatcher, which compiled C++ does not: the pieces here
are those of the traced model, run by torch, op by op.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nano import LLM, SamplingParams
from nano.compile import compile_model
from nano.compile.artifact import ForwardFn, split_op_name
from nano.compile.piecewise import named_tensors, trace
from nano.compile.skeleton import dump_skeleton, load_skeleton
from nano.compile.store import MANIFEST, ArtifactStore
from nano.device.recording_graph import RecordingCpu
from nano.layers.native_kernels import NativeKernels
from nano.models.decoder import Decoder
from nano.worker import worker
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")

SETTINGS = {
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 32,
}
PROMPTS = [[i] * length for i, length in enumerate((3, 50, 7, 20))]
PARAMS = [
    SamplingParams(max_tokens=80, temperature=0.7 * (i % 2), seed=i, logprobs=1, ignore_eos=True)
    for i in range(4)
]


class TracedPieces:
    """In place of `artifact.load`. `num_calls` of the forward that it gives."""

    def __init__(self) -> None:
        self.num_calls = 0

    def load(
        self, folder: Path, model: nn.Module, split_ops: Mapping[str, Callable[..., None]]
    ) -> Iterator[ForwardFn | None]:
        torch._dynamo.reset()
        traced = trace(load_skeleton(dump_skeleton(model)), Decoder.INPUTS, tuple(split_ops))
        tensors = named_tensors(model)
        names: dict[str, Any] = {f"w{i}": tensors[name] for i, name in enumerate(traced.weights)}
        names |= {f"piece_{i}": piece.graph for i, piece in enumerate(traced.pieces)}
        names |= {split_op_name(op): function for op, function in split_ops.items()}
        exec(traced.source, names)

        def forward(*inputs: Tensor) -> Tensor:
            self.num_calls += 1
            return names["run"](*inputs)

        yield forward


class SlowCompiler:
    """In place of the child that compiles. It has finished when it was asked so often."""

    def __init__(self, store: ArtifactStore, num_polls: int):
        self._store = store
        self._num_polls_left = num_polls

    def __call__(self, request: Any, *, is_background: bool) -> "SlowCompiler":
        self._key = request.key
        return self

    def poll(self) -> int | None:
        self._num_polls_left -= 1
        if self._num_polls_left > 0:
            return None
        (self._store.root / self._key).mkdir(parents=True, exist_ok=True)
        (self._store.root / self._key / MANIFEST).touch()
        return 0

    def close(self) -> None:
        pass


def generate(llm: LLM) -> list[Any]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False
    )
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def test_graphs_of_the_eager_model_are_captured_anew_when_its_pieces_are_there(
    tmp_path, monkeypatch
):
    checkpoint = make_checkpoint(tmp_path / "m")
    with LLM(checkpoint, compile_mode="eager", **SETTINGS) as llm:
        expected = generate(llm)
    device, pieces, store = RecordingCpu(), TracedPieces(), ArtifactStore(tmp_path / "store")
    monkeypatch.setattr(worker, "make_device", lambda *_: device)
    monkeypatch.setattr(compile_model, "load", pieces.load)
    monkeypatch.setattr(compile_model, "CompilerProcess", SlowCompiler(store, num_polls=30))
    monkeypatch.setattr(ArtifactStore, "default", lambda: store)
    with LLM(checkpoint, compile_mode="compiled", **SETTINGS) as llm:
        target = llm._client._core._executor._worker.target
        (graphs,) = target.graphs
        of_eager = list(graphs.captured)
        assert len(of_eager) > 5
        (first,) = device.pools
        step, num_replays = llm._client._core.step, []

        def watched() -> Any:
            if target.forward.mode == "compiled":
                num_replays.append(first.num_replays)
            return step()

        monkeypatch.setattr(llm._client._core, "step", watched)
        assert generate(llm) == expected  # pieces come in the middle of it
        assert len(num_replays) > 20
        assert num_replays[0] > 0
        assert set(num_replays) == {num_replays[0]}, "graphs of the eager model are replayed"
        first, second = device.pools
        assert second.num_replays > 0
        while graphs.captured != of_eager:
            llm._client._core.idle()
        assert pieces.num_calls > 2 * len(of_eager)  # each is run before it is captured
        num_calls = pieces.num_calls
        assert generate(llm) == expected
        assert pieces.num_calls < num_calls + 5  # all but a few steps are replayed
