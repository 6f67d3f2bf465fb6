"""Made-up models are whole checkpoints, the same every time, and their texts are not near-ties."""

import filecmp
import shutil
from collections import namedtuple

import pytest
import torch

from nano import LLM, SamplingParams
from nano.errors import CheckpointError
from nano.gpu_check.models import SHAPES, Models, size_of, write_checkpoint

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def test_a_checkpoint_is_the_same_every_time(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    num_bytes = [write_checkpoint(folder, TINY, CPU) for folder in folders]
    files = [folder / "model.safetensors" for folder in folders]
    assert filecmp.cmp(*files, shallow=False)
    assert num_bytes[0] < files[0].stat().st_size < num_bytes[0] + 10_000


def test_its_texts_vary_and_have_clear_winners(tmp_path):
    write_checkpoint(tmp_path, TINY, CPU)
    params = SamplingParams(temperature=0.0, max_tokens=48, logprobs=2, ignore_eos=True)
    prompts = [{"prompt_token_ids": [300 + i, 5, 17 * i]} for i in range(4)]
    with LLM(tmp_path, max_model_len=128, generation_config="vllm") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    assert len({token_id for answer in answers for token_id in answer.token_ids}) > 8
    gaps = []
    for answer in answers:
        assert answer.logprobs is not None
        for tops in answer.logprobs:
            first, second = sorted((one.logprob for one in tops.values()), reverse=True)[:2]
            gaps.append(first - second)
    assert sorted(gaps)[len(gaps) // 2] > 0.5


@pytest.mark.parametrize(
    ("name", "low", "high"), [("135M", 0.13e9, 0.14e9), ("1.5B", 1.5e9, 1.6e9), ("8B", 7.4e9, 8e9)]
)
def test_shapes_have_the_size_that_their_names_say(tmp_path, monkeypatch, name, low, high):
    monkeypatch.setattr("nano.gpu_check.models.write_safetensors", lambda *_: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(10**12))
    num_bytes = write_checkpoint(tmp_path, SHAPES[name], CPU)
    size = size_of(tmp_path)
    assert low < size.num_weights < high
    untied = 0 if SHAPES[name].is_tied else size.num_output_weights  # the embedding
    assert num_bytes == 2 * (size.num_weights + untied)


def test_a_full_disk_is_a_refusal_with_the_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(10**5))
    with pytest.raises(
        CheckpointError, match=r"tiny: 0.0 GB of weights do not fit .*--work-folder"
    ):
        write_checkpoint(tmp_path, TINY, CPU)


def test_models_are_written_once_and_a_given_one_takes_every_place(tmp_path):
    models = Models(tmp_path, CPU)
    assert models.target("tiny") == models.target("tiny")
    assert models.draft("tiny") != models.target("tiny")
    assert set(models.writing) == {"tiny", "tiny-draft"}
    given = Models(tmp_path, CPU, given=tmp_path / "real")
    assert given.target("8B") == given.draft("8B") == tmp_path / "real"
    assert not given.writing
