"""nano.verify finds identity where it is, and a difference where there is one."""

import json
import sys
from pathlib import Path

import pytest

from nano import verify
from nano.errors import ConfigError
from nano.layers.native_kernels import NativeKernels
from nano.outputs import CompletionOutput, Logprob
from tests.tiny import make_checkpoint

needs_compiler = pytest.mark.skipif(
    not NativeKernels.is_available(), reason="bits are promised on our own kernels"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("verified"))


def run(monkeypatch, checkpoint: Path, folder: Path, *more: str) -> tuple[int, dict]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        '{"prompt": "one two one two"}\nplain text, plain text\n{"turns": ["a b a b"]}\n'
    )
    output = folder / "certificate.json"
    arguments = ["--model", checkpoint, "--prompts", prompts, "--output", output, *more]
    monkeypatch.setattr(sys, "argv", ["verify", *map(str, arguments)])
    status = verify.main()
    return status, json.loads(output.read_text()) if output.exists() else {}


@needs_compiler
def test_every_proposer_is_identical_in_every_engine(monkeypatch, checkpoint, tmp_path):
    status, certificate = run(
        monkeypatch,
        checkpoint,
        tmp_path,
        *("--max-model-len", "128", "--max-tokens", "20", "--lengths", "1", "4"),
        *("--chunk-sizes", "5", "--preempting-blocks", "8"),
    )
    assert status == 0
    assert certificate["promises_bits"]
    assert certificate["verdict"] == "identical"
    checks = certificate["checks"]
    # three engines, two temperatures; off and five proposers at two lengths
    assert len(checks) == 3 * 2 * (1 + 5 * 2)
    assert all(check["num_identical_logprobs"] == 3 for check in checks)
    assert sum(check["num_drafted"] for check in checks if check["proposer"] == "junk") > 100
    assert all(check["num_drafted"] == 0 for check in checks if not check["proposer"])


@needs_compiler
def test_a_rule_that_changes_tokens_is_found_out(monkeypatch, checkpoint, tmp_path, capsys):
    synthetic = {
        "method": "ngram",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0],
    }
    status, certificate = run(
        monkeypatch,
        checkpoint,
        tmp_path,
        *("--max-model-len", "128", "--lengths", "4", "--chunk-sizes", "--temperatures", "0.8"),
        *("--speculative-config", json.dumps(synthetic)),
    )
    assert status == 1
    assert certificate["verdict"] == "different"
    differing = [check for check in certificate["checks"] if check["differences"]]
    assert "junk" in {check["proposer"] for check in differing}
    assert "first divergence of prompt" in capsys.readouterr().out


def completion(*tokens: tuple[int, dict[int, float]]) -> CompletionOutput:
    logprobs = [{i: Logprob(value) for i, value in top.items()} for _, top in tokens]
    return CompletionOutput(0, "", [token for token, _ in tokens], logprobs=logprobs)


def test_the_gap_is_that_of_the_two_tokens_where_the_target_saw_both():
    wanted = completion((5, {5: -0.1}), (7, {7: -1.0, 8: -1.25}))
    check = verify.Check("engine", "someone", 4, 0.0)
    verify._compare(check, 0, completion((5, {5: -0.1}), (8, {8: -1.0})), wanted)
    verify._compare(check, 1, completion((5, {5: -0.1})), wanted)
    verify._compare(check, 2, completion((5, {5: -0.1}), (7, {7: -1.5, 8: -1.25})), wanted)
    first, shorter = check.differences
    assert (first.position, first.token_id, first.expected_token_id) == (1, 8, 7)
    assert first.logit_gap == 0.25
    assert (shorter.prompt, shorter.position, shorter.logit_gap) == (1, 1, None)
    assert (check.num_prompts, check.num_identical, check.num_identical_logprobs) == (3, 1, 0)


@pytest.mark.parametrize("text", ["", '{"question": 1}\n', '{"prompt": \n', '{"turns": []}\n'])
def test_files_without_prompts_are_refused(tmp_path, text):
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(ConfigError, match="prompts"):
        verify.read_prompts(file)
    with pytest.raises(ConfigError, match="cannot read"):
        verify.read_prompts(tmp_path / "missing")
