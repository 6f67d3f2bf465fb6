"""Speculation as the library's callers see it: what they may ask for and what they are told."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nano.llm
from nano import LLM, SamplingParams
from nano.errors import InvalidRequest
from nano.outputs import CompletionOutput, FinishReason, SpeculationTrace
from nano.speculation import RequestSpeculation
from tests.serve.drafting import ANSWER, DraftingClient
from tests.tiny import make_checkpoint

PARAMS = SamplingParams(max_tokens=20, seed=0)
TEXT = ANSWER[:20].decode()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def client() -> DraftingClient:
    return DraftingClient()


@pytest.fixture
def llm(checkpoint: Path, client: DraftingClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """A library whose core drafts by script."""
    monkeypatch.setattr(nano.llm, "_make_client", lambda config, use_subprocess: client)
    with LLM(checkpoint) as llm:
        yield llm


def generate(llm: LLM, prompts: Any = "p", params: Any = PARAMS, **wishes: Any) -> Any:
    return llm.generate(prompts, params, use_tqdm=False, **wishes)


def only(llm: LLM, **wishes: Any) -> CompletionOutput:
    (output,) = generate(llm, **wishes)
    (completion,) = output.outputs
    return completion


def test_every_wish_gives_the_same_answer_and_its_own_report(llm: LLM) -> None:
    plain = only(llm, speculative={"enabled": False})
    assert plain.text == TEXT
    assert plain.speculative is not None
    assert (plain.speculative.methods, plain.speculative.stats.num_steps) == ((), 20)
    for wishes, methods, num_steps in (
        ({}, ("fast",), 8),  # one token, then three in each step
        ({"prediction": TEXT}, ("echo", "fast"), 4),  # one, then nine, nine, and one
        ({"prediction": TEXT, "speculative": {"method": "fast"}}, ("fast",), 8),
        ({"speculative": {"methods": ["fast"], "num_tokens": 1}}, ("fast",), 11),  # one, then two
    ):
        completion = only(llm, **wishes)
        assert completion == plain
        report = completion.speculative
        assert report is not None
        assert (report.methods, report.stats.num_steps) == (methods, num_steps)
        assert report.stats.num_tokens >= 20


def test_a_prediction_is_counted_as_it_is_accepted(llm: LLM) -> None:
    prediction = TEXT[:4] + "QUICK" + TEXT[9:]  # five of twenty are wrong
    report = only(llm, prediction=prediction, speculative={"method": "echo"}).speculative
    assert report is not None
    echo = report.stats.by_proposer["echo"]
    # "he " and a miss; a miss at once in four steps; " brown fo"; and the last two.
    assert (echo.num_offered_per_pos[0], echo.num_accepted_per_pos[0]) == (7, 3)
    assert report.num_accepted_prediction_tokens == 3 + 8 + 2
    assert report.num_rejected_prediction_tokens == 5 + 4 * 8
    assert echo.acceptance_rate == 13 / 50


def test_one_wish_serves_all_prompts_or_each_has_its_own(llm: LLM, client: DraftingClient) -> None:
    prompts = ["a", "b", "c"]
    generate(llm, prompts, speculative={"num_tokens": 2}, prediction="xy")
    assert {child.prediction_token_ids for child in client.requests} == {tuple(b"xy")}
    assert {child.speculation.num_tokens for child in client.requests} == {2}
    client.requests.clear()
    generate(
        llm, prompts, speculative=[{"num_tokens": 1}, None, {}], prediction=["x", None, [121, 122]]
    )
    assert [child.speculation.num_tokens for child in client.requests] == [1, None, None]
    predictions = [child.prediction_token_ids for child in client.requests]
    assert predictions == [(120,), (), (121, 122)]
    client.requests.clear()
    generate(llm, prompts, speculative=RequestSpeculation(("fast",)), prediction=[121, 122])
    assert {child.prediction_token_ids for child in client.requests} == {(121, 122)}
    assert {child.speculation.methods for child in client.requests} == {("fast",)}
    client.requests.clear()
    generate(llm, prompts, prediction=[])
    assert {child.prediction_token_ids for child in client.requests} == {()}


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"speculative": "fast"}, "speculative must be an object, got 'fast'"),
        ({"speculative": [{}]}, "speculative has 1 entries for 2 prompts"),
        ({"speculative": {"method": "slow"}}, "no method 'slow'; it has echo, fast"),
        ({"speculative": [{}, {"num_tokens": 9}]}, "num_tokens must be at most 8"),
        ({"prediction": ["x"]}, "prediction has 1 entries for 2 prompts"),
        ({"prediction": [None, "x", None]}, "prediction has 3 entries for 2 prompts"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction must be .* got dict"),
        ({"prediction": [1, "x"]}, "prediction must hold token ids, got 'x'"),
        ({"speculative_trace": "yes"}, "speculative_trace must be true or false"),
    ],
)
def test_bad_wishes_are_refused_before_anything_is_queued(
    llm: LLM, client: DraftingClient, wishes: dict[str, Any], message: str
) -> None:
    for call in (
        lambda: generate(llm, ["a", "b"], **wishes),
        lambda: llm.chat([[{"role": "user", "content": "a"}]] * 2, use_tqdm=False, **wishes),
    ):
        with pytest.raises(InvalidRequest, match=message) as caught:
            call()
        assert caught.value.param in wishes
    assert client.requests == []


def test_a_chat_takes_the_same_wishes(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, PARAMS, use_tqdm=False, prediction=TEXT, speculative_trace=True)
    (completion,) = output.outputs
    assert completion.text == TEXT
    assert completion.speculative_trace is not None
    assert completion.speculative_trace.sources.count("echo") == 8 + 8 + 1


@pytest.mark.parametrize("stop", ["brown", "ick", "T", "x j"])
@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_string_in_an_accepted_run_ends_everything(
    llm: LLM, stop: str, shown: bool
) -> None:  # B004
    params = SamplingParams(max_tokens=40, seed=0, stop=[stop], include_stop_str_in_output=shown)
    off = only(llm, params=params, speculative={"enabled": False})
    text = ANSWER.decode()
    assert off.text == text[: text.index(stop) + (len(stop) if shown else 0)]
    for wishes in ({}, {"prediction": text}):
        completion = only(llm, params=params, speculative_trace=True, **wishes)
        assert completion == off
        assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
        trace, report = completion.speculative_trace, completion.speculative
        assert trace is not None
        assert report is not None
        assert len(trace.sources) == len(trace.steps) == len(completion.token_ids)
        assert report.stats.num_tokens == len(completion.token_ids)
        silent = only(llm, params=params, **wishes)  # counts do not need the caller's trace
        assert silent.speculative == report
        assert silent.speculative_trace is None


def test_a_streamed_trace_adds_up_to_the_whole_and_n_choices_keep_their_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, seed=0, n=3)
    (whole,) = generate(llm, params=params, prediction=TEXT, speculative_trace=True)
    assert [completion.text for completion in whole.outputs] == [
        ANSWER[i : i + 20].decode() for i in range(3)
    ]
    pieces = [SpeculationTrace() for _ in range(3)]
    reports = {}
    for output in generate(
        llm, params=params, prediction=TEXT, speculative_trace=True, stream=True
    ):
        for completion in output.outputs:
            piece, trace = completion.speculative_trace, pieces[completion.index]
            assert piece is not None
            assert len(piece.sources) == len(completion.token_ids)
            trace.sources += piece.sources
            trace.steps += piece.steps
            trace.rejected += piece.rejected
            if completion.is_finished:
                reports[completion.index] = completion.speculative
    for completion, trace in zip(whole.outputs, pieces):
        expected = completion.speculative_trace
        assert trace.sources == expected.sources
        assert [r.position for r in trace.rejected] == [r.position for r in expected.rejected]
        assert reports[completion.index] == completion.speculative
        for rejected in trace.rejected:
            assert completion.token_ids[rejected.position] == rejected.sampled_token_id
    # The prediction is the first choice's answer and nothing like the others'.
    accepted = [c.speculative.num_accepted_prediction_tokens for c in whole.outputs]
    assert accepted[0] > 10 * max(accepted[1:], default=0)


STATIC = {"method": "prediction", "draft_length": "static"}  # drafts whether or not they pay


def test_a_real_engine_answers_the_same_with_and_without_drafts(checkpoint: Path) -> None:
    params = SamplingParams(
        max_tokens=24, seed=3, logprobs=1, ignore_eos=True, allowed_token_ids=[*b"abcdefgh"]
    )
    with LLM(checkpoint, max_num_batched_tokens=64, speculative_config=STATIC) as llm:
        plain = only(llm, params=params)
        stop = plain.text[9:13]  # within the run that a prediction of the whole gets accepted
        for stops, num_tokens in (([], 24), ([stop], plain.text.index(stop) + len(stop))):
            params = dataclasses.replace(params, stop=stops)
            off = only(llm, params=params, speculative={"enabled": False})
            assert off.token_ids == plain.token_ids[:num_tokens]
            traced = only(llm, params=params, prediction=plain.text, speculative_trace=True)
            silent = only(llm, params=params, prediction=plain.text)
            assert traced == silent == off
            trace, report = traced.speculative_trace, traced.speculative
            assert trace is not None
            assert report is not None
            assert report == silent.speculative
            assert report.num_accepted_prediction_tokens == trace.sources.count("prediction") > 8
            assert report.num_rejected_prediction_tokens == len(trace.rejected) == 0
            assert report.stats.num_tokens == len(trace.sources) == num_tokens
            assert report.stats.num_steps == len(set(trace.steps)) < num_tokens / 2
