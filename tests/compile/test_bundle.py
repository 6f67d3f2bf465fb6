"""Pieces as a GPU's are kept, compiled and run on the CPU: nothing of the way knows the device."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nano import LLM, SamplingParams
from nano.compile import artifact, bundle
from nano.compile.artifact import BadArtifact, Manifest
from nano.compile.store import ArtifactStore
from nano.native.build import compiler
from tests.models.whole_prompt import load
from tests.tiny import make_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler"),
]
NUM_LAYERS = 3
SIZES = (1, 2, 7, 64)

# What the compiling child does: no flag of Inductor's is as another test has left it.
BUILD = """
import sys
from pathlib import Path

import torch

from nano.compile.build_artifact import build_artifact
from nano.compile.skeleton import dump_skeleton, load_skeleton
from tests.models.whole_prompt import load

checkpoint, folder = map(Path, sys.argv[1:])
skeleton = load_skeleton(dump_skeleton(load(checkpoint, dtype=torch.float64)))
build_artifact(skeleton, skeleton.INPUTS, ("nano::attention",), {}, folder, form="bundle")
"""

# What a later start does, in a process of its own.
LOAD = """
import json, sys
from pathlib import Path

import torch

from nano.attention.op import ForwardContext, attend, forward_context
from nano.compile import artifact
from tests.models.whole_prompt import WholePromptBackend, load, prompt

checkpoint, folder, *sizes = sys.argv[1:]
model = load(Path(checkpoint), dtype=torch.float64)
*_, forward = artifact.load(Path(folder), model, {"nano::attention": attend})
backend = WholePromptBackend(16, model.config.head_dim**-0.5)
context = ForwardContext(backend, [torch.empty(0)] * model.config.num_layers)
errors = {}
with torch.inference_mode(), forward_context(context):
    for size in map(int, sizes):
        inputs = prompt(size).int(), torch.arange(size), torch.arange(size - 1, -1, -2)
        expected, result = model(*inputs), forward(*inputs)
        assert result.shape == expected.shape
        errors[size] = float((result - expected).abs().max() / expected.abs().max())
from torch._dynamo.utils import counters

counts = {"traced": counters["frames"], "missed": counters["inductor"]["fxgraph_cache_miss"]}
print(json.dumps([errors, counts]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(folder / "m", num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def artifact_folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built under another name than it is loaded from, as in the store."""
    folder = tmp_path_factory.mktemp("artifact")
    unfinished = folder / "unfinished"
    unfinished.mkdir()
    run(BUILD, checkpoint, unfinished)
    return unfinished.rename(folder / "finished")


def test_three_pieces_are_compiled_whatever_the_depth(artifact_folder):
    manifest = Manifest.read(artifact_folder)
    assert manifest.report.uses == [1, NUM_LAYERS - 1, 1]
    assert (manifest.form, manifest.kernels, manifest.ops) == ("bundle", [], {})
    assert sorted(manifest.digests) == [
        "piece_0.bundle",
        "piece_1.bundle",
        "piece_2.bundle",
        "pieces.py",
    ]


def test_what_was_written_can_be_read(artifact_folder):
    first, *rest = [file.read_text() for file in artifact.sources(artifact_folder)]
    assert "def run(input_ids, positions, rows):" in first
    assert sum("def call(" in text for text in rest) == 3


def test_another_process_runs_them_at_every_size_and_traces_and_compiles_nothing(
    checkpoint, artifact_folder
):
    libraries = modified(artifact_folder, "*.so")
    assert libraries
    errors, counts = json.loads(run(LOAD, checkpoint, artifact_folder, *SIZES))
    assert list(map(int, errors)) == list(SIZES)
    assert max(errors.values()) < 1e-9
    assert counts == {"traced": {}, "missed": 0}
    assert modified(artifact_folder, "*.so") == libraries
    Manifest.read(artifact_folder)  # nor is anything changed that has a digest


def run(program: str, *arguments: object) -> str:
    """What `program` prints in a process of its own."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modified(folder: Path, pattern: str) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in folder.rglob(pattern)}


@pytest.mark.parametrize("damage", ["half", "gone", "another torch"])
def test_what_is_damaged_or_of_another_torch_is_a_bad_artifact(
    checkpoint, artifact_folder, tmp_path, monkeypatch, damage
):
    digests = Manifest.read(artifact_folder).digests
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # loading sets it
    folder = shutil.copytree(artifact_folder, tmp_path / "copy")
    file = folder / "piece_1.bundle"
    if damage == "gone":
        file.unlink()
    elif damage == "half":
        file.write_bytes(file.read_bytes()[:5000])
    else:
        monkeypatch.setattr("torch._inductor.codecache.torch_key", lambda: b"another")
    # As if every file were what it was: what is left are the checks of loading.
    monkeypatch.setattr(artifact, "digest_of", lambda file: digests[file.name])
    with pytest.raises(BadArtifact):
        list(artifact.load(folder, load(checkpoint), {}))


def test_an_engine_computes_with_them(checkpoint, artifact_folder, monkeypatch):
    def generate(mode: str) -> list[list[int]]:
        prompts = [[1, 2, 3], [5] * 20, [7]]
        params = SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True)
        with LLM(checkpoint, dtype="float64", compile_mode=mode) as llm:
            assert llm._client._core._executor._worker.target.forward.mode == mode
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    expected = generate("eager")
    monkeypatch.setattr(ArtifactStore, "find", lambda self, key: artifact_folder)
    assert generate("compiled") == expected


def test_a_place_that_cannot_be_written_to_serves_as_well(tmp_path, monkeypatch):
    (tmp_path / "inductor").mkdir()
    assert bundle._writable(tmp_path / "inductor") == tmp_path / "inductor"
    monkeypatch.setattr(os, "access", lambda *_: False)
    elsewhere = bundle._writable(tmp_path / "inductor")
    assert elsewhere.stat().st_mode & 0o077 == 0
    elsewhere.rmdir()
