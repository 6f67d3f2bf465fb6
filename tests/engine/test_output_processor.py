import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano.engine.input_processor import PreparedRequest
from nano.engine.messages import EngineRequest
from nano.engine.output_processor import OutputKind, OutputProcessor
from nano.errors import InvalidRequest
from nano.outputs import (
    CompletionOutput,
    FinishReason,
    RejectedDraft,
    RequestOutput,
    SpeculationReport,
    SpeculationTrace,
    TokenOutput,
)
from nano.sampling_params import SamplingParams
from nano.speculation import DraftRecord, ProposerStats, SpeculationStats
from nano.step import TokenLogprobs
from tests import tiny
from tests.vocabularies import byte_tokenizer

EMOJI = "\U0001fae0".encode()
EOS = tiny.EOS_TOKEN_ID


def prepared(
    request_id: str = "r",
    n: int = 1,
    report: SpeculationReport | None = None,
    shows_trace: bool = False,
    traces_drafts: bool = False,
    **params: Any,
) -> PreparedRequest:
    sampling_params = SamplingParams(n=n, seed=5, **params)
    children = [
        EngineRequest(
            request_id=request_id if n == 1 else f"{index}_{request_id}",
            prompt_token_ids=list(b"prompt"),
            sampling_params=dataclasses.replace(sampling_params, n=1, seed=5 + index),
            arrival_time=10.0,
            traces_drafts=traces_drafts,
        )
        for index in range(n)
    ]
    return PreparedRequest(
        request_id,
        "prompt",
        list(b"prompt"),
        sampling_params,
        10.0,
        children,
        report,
        shows_trace,
    )


def news(data: bytes | list[int], request_id: str = "r", **fields: Any) -> TokenOutput:
    return TokenOutput(request_id=request_id, new_token_ids=list(data), **fields)


def logprobs_of(*tokens: tuple[list[int], list[float], int]) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=[ids for ids, _, _ in tokens],
        logprobs=[logprobs for _, logprobs, _ in tokens],
        ranks=[rank for _, _, rank in tokens],
    )


class Run:
    """One request fed by hand; keeps what comes out."""

    def __init__(self, kind: OutputKind = OutputKind.FINAL, n: int = 1, **params: Any):
        self.processor = OutputProcessor(byte_tokenizer())
        self.processor.register(prepared(n=n, **params), kind)
        self.outputs: list[RequestOutput] = []
        self.aborted: list[str] = []
        self.now = 11.0

    def feed(self, *outputs: TokenOutput) -> "Run":
        self.outputs += self.processor.process(outputs, self.now)
        self.aborted += self.processor.take_abort_ids()
        self.now += 1.0
        return self

    @property
    def completion(self) -> CompletionOutput:
        """The only completion of the only, finished output."""
        (output,) = self.outputs
        assert output.finished
        (completion,) = output.outputs
        return completion


def test_a_finished_request_is_answered_once_with_everything() -> None:
    run = Run().feed(news(b"Hel")).feed(news(b"lo", finish_reason=FinishReason.LENGTH))
    output = run.outputs[0]
    assert (output.request_id, output.prompt, output.prompt_token_ids) == (
        "r",
        "prompt",
        list(b"prompt"),
    )
    assert run.completion == CompletionOutput(
        index=0,
        text="Hello",
        token_ids=list(b"Hello"),
        finish_reason=FinishReason.LENGTH,
        seed=5,
    )
    assert run.processor.num_unfinished_requests == 0


@pytest.mark.parametrize("shown", [False, True])
def test_end_of_sequence_stops_and_its_text_is_special(shown: bool) -> None:  # B080
    run = Run(skip_special_tokens=False, include_stop_str_in_output=shown)
    run.feed(news([*b"Hi", EOS], finish_reason=FinishReason.STOP))
    assert run.completion.token_ids == [*b"Hi", EOS]
    assert run.completion.text == ("Hi</s>" if shown else "Hi")
    assert (run.completion.finish_reason, run.completion.stop_reason) == (FinishReason.STOP, None)


def test_an_ignored_end_of_sequence_is_a_token_like_any_other() -> None:  # B080
    run = Run(ignore_eos=True).feed(news([65, EOS], finish_reason=FinishReason.LENGTH))
    assert (run.completion.text, len(run.completion.token_ids)) == ("A", 2)
    assert run.completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("shown", [False, True])
def test_a_stop_tokens_text_is_left_out_unless_asked_for(shown: bool) -> None:  # B080
    run = Run(stop_token_ids=[46], include_stop_str_in_output=shown)
    run.feed(news(b"Hi.", finish_reason=FinishReason.STOP, stop_token_id=46))
    assert run.completion.text == ("Hi." if shown else "Hi")
    assert run.completion.token_ids == list(b"Hi.")
    assert run.completion.stop_reason == 46


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("chunks", [[b"one t", b"wo three"], [b"one two three"], [b"one two"]])
def test_everything_is_cut_at_the_token_that_completes_a_stop_string(
    chunks: list[bytes], shown: bool
) -> None:  # B076
    run = Run(stop=["two"], include_stop_str_in_output=shown)
    for chunk in chunks:
        run.feed(news(chunk))
    run.feed(news(b" late", finish_reason=FinishReason.LENGTH))
    assert run.completion.text == ("one two" if shown else "one ")
    assert run.completion.token_ids == list(b"one two")
    assert (run.completion.finish_reason, run.completion.stop_reason) == (FinishReason.STOP, "two")
    assert run.aborted == ["r"]


def test_a_stop_string_before_the_cores_own_end_wins_and_needs_no_abort() -> None:
    run = Run(stop=["b"]).feed(news([*b"abc", EOS], finish_reason=FinishReason.STOP))
    assert (run.completion.text, run.completion.stop_reason) == ("a", "b")
    assert run.completion.token_ids == list(b"ab")
    assert run.aborted == []


def test_stop_strings_wait_for_min_tokens() -> None:
    run = Run(stop=["a"], min_tokens=3).feed(news(b"aabab"))
    assert (run.completion.text, run.completion.token_ids) == ("aab", list(b"aaba"))
    exact = Run(stop=["a"], min_tokens=2).feed(news(b"aabab"))
    assert (exact.completion.text, exact.completion.token_ids) == ("a", list(b"aa"))


def test_held_text_is_shown_when_the_request_ends_without_the_stop_string() -> None:
    run = Run(OutputKind.DELTA, stop=["own fox"]).feed(news(b"br own f"))
    run.feed(news([], finish_reason=FinishReason.LENGTH))
    assert [output.outputs[0].text for output in run.outputs] == ["br ", "own f"]


@pytest.mark.parametrize("kind", [OutputKind.FINAL, OutputKind.DELTA])
def test_half_a_character_at_the_end_is_one_replacement_in_every_mode(kind: OutputKind) -> None:
    run = Run(kind).feed(news(b"a"))  # B073
    run.feed(news(EMOJI[:2], finish_reason=FinishReason.LENGTH))
    assert "".join(output.outputs[0].text for output in run.outputs) == "a\ufffd"
    ids = [token_id for output in run.outputs for token_id in output.outputs[0].token_ids]
    assert ids == [97, *EMOJI[:2]]


def test_deltas_hold_only_what_is_new() -> None:
    run = Run(OutputKind.DELTA, logprobs=0)
    run.feed(news(b"a", logprobs=logprobs_of(([97], [-1.0], 1))))
    run.feed(news(b"b", logprobs=logprobs_of(([98], [-2.0], 3))))
    run.feed(news([], finish_reason=FinishReason.ABORT))
    seen = [output.outputs[0] for output in run.outputs]
    assert [(c.text, c.token_ids) for c in seen] == [("a", [97]), ("b", [98]), ("", [])]
    assert [len(c.logprobs or []) for c in seen] == [1, 1, 0]
    assert [c.cumulative_logprob for c in seen] == [-1.0, -3.0, -3.0]
    assert [output.finished for output in run.outputs] == [False, False, True]


def test_cumulative_outputs_grow_and_earlier_ones_stay_as_they_were() -> None:
    run = Run(OutputKind.CUMULATIVE).feed(news(b"a")).feed(news(b"b"))
    run.feed(news(b"c", finish_reason=FinishReason.LENGTH))
    assert [output.outputs[0].text for output in run.outputs] == ["a", "ab", "abc"]
    assert [len(output.outputs[0].token_ids) for output in run.outputs] == [1, 2, 3]


def test_logprobs_start_with_the_token_and_name_the_alternatives() -> None:
    entry = logprobs_of(([98, 97, 98], [-2.0, -0.5, -2.0], 7), ([0xF0, 99], [-3.0, -0.1], 9))
    run = Run(logprobs=2).feed(news([98, 0xF0], logprobs=entry, finish_reason=FinishReason.LENGTH))
    first, second = run.completion.logprobs or []
    assert list(first) == [98, 97]
    assert (first[98].logprob, first[98].rank, first[98].decoded_token) == (-2.0, 7, "b")
    assert (first[97].logprob, first[97].rank, first[97].decoded_token) == (-0.5, 1, "a")
    assert (second[0xF0].rank, second[0xF0].decoded_token) == (9, "\ufffd")
    assert run.completion.cumulative_logprob == -5.0


def test_logprobs_are_cut_with_the_tokens() -> None:  # B076
    entry = logprobs_of(([97], [-1.0], 1), ([98], [-2.0], 1), ([99], [-4.0], 1))
    run = Run(logprobs=0, stop=["b"]).feed(news(b"abc", logprobs=entry))
    assert [list(position) for position in run.completion.logprobs or []] == [[97], [98]]
    assert run.completion.cumulative_logprob == -3.0


def test_prompt_logprobs_are_gathered_from_the_chunks_of_the_prompt() -> None:
    run = Run(OutputKind.DELTA, prompt_logprobs=0)
    run.feed(news([], prompt_logprobs=logprobs_of(([114], [-1.0], 1), ([111], [-2.0], 1))))
    assert run.outputs == []  # nothing of the answer yet
    run.feed(news(b"x", prompt_logprobs=logprobs_of(([109], [-3.0], 4))))
    none, *rest = run.outputs[0].prompt_logprobs or []
    assert none is None
    assert [list(position or ()) for position in rest] == [[114], [111], [109]]


def test_each_of_n_choices_ends_on_its_own() -> None:  # B063
    run = Run(OutputKind.DELTA, n=3, stop=["."])
    run.feed(news(b"a.", "0_r"), news(b"b", "1_r"), news(b"c", "2_r"))
    run.feed(news(b"bb", "1_r"), news(b"c.c", "2_r"))
    run.feed(news(b"b", "1_r", finish_reason=FinishReason.LENGTH), news(b"x", "0_r"))
    first, second, third = run.outputs
    assert [(c.index, c.text, c.finish_reason) for c in first.outputs] == [
        (0, "a", FinishReason.STOP),
        (1, "b", None),
        (2, "c", None),
    ]
    assert [(c.index, c.text) for c in second.outputs] == [(1, "bb"), (2, "c")]
    assert [(c.index, c.text, c.finish_reason) for c in third.outputs] == [
        (1, "b", FinishReason.LENGTH)
    ]
    assert [output.finished for output in run.outputs] == [False, False, True]
    assert run.aborted == ["0_r", "2_r"]
    assert [c.seed for c in first.outputs] == [5, 6, 7]


def test_the_final_output_of_n_holds_all_choices_in_order() -> None:  # B063
    run = Run(n=2).feed(news(b"bb", "1_r", finish_reason=FinishReason.LENGTH))
    assert run.outputs == []
    run.feed(news(b"a", "0_r", finish_reason=FinishReason.STOP))
    assert [(c.index, len(c.token_ids)) for c in run.outputs[0].outputs] == [(0, 1), (1, 2)]


def test_news_after_the_end_is_dropped() -> None:
    run = Run().feed(news(b"a", finish_reason=FinishReason.LENGTH))
    run.feed(news(b"b", finish_reason=FinishReason.ABORT), news(b"x", "never heard of"))
    assert len(run.outputs) == 1
    assert run.completion.text == "a"


def test_an_engine_error_ends_the_request_with_its_reason() -> None:
    run = Run().feed(news(b"a"), news([], finish_reason=FinishReason.ERROR, error="NaN logits"))
    assert run.completion.finish_reason is FinishReason.ERROR
    assert (run.completion.error, run.completion.text) == ("NaN logits", "a")


def test_an_aborted_request_ends_once_and_names_what_the_core_should_drop() -> None:
    run = Run(n=2).feed(news(b"a", "0_r", finish_reason=FinishReason.LENGTH), news(b"b", "1_r"))
    output = run.processor.abort("r", now=20.0)
    assert run.processor.take_abort_ids() == ["1_r"]
    assert output is not None
    assert [c.finish_reason for c in output.outputs] == [FinishReason.LENGTH, FinishReason.ABORT]
    assert [c.text for c in output.outputs] == ["a", "b"]
    assert run.processor.abort("r", now=21.0) is None
    assert run.processor.take_abort_ids() == []
    assert run.feed(news(b"c", "1_r", finish_reason=FinishReason.ABORT)).outputs == []


def test_a_dead_core_fails_every_request_once() -> None:
    processor = OutputProcessor(byte_tokenizer())
    processor.register(prepared("one"), OutputKind.DELTA)
    processor.register(prepared("two", n=2))
    failed = processor.fail_all("the core died", now=20.0)
    assert [output.request_id for output in failed] == ["one", "two"]
    assert all(output.finished for output in failed)
    assert {c.error for output in failed for c in output.outputs} == {"the core died"}
    assert processor.fail_all("again", now=21.0) == []


def test_a_request_id_in_flight_cannot_be_used_again() -> None:
    processor = OutputProcessor(byte_tokenizer())
    processor.register(prepared("r", n=2))
    for taken in ("r", "1_r"):
        with pytest.raises(InvalidRequest, match=f"'{taken}' is in use"):
            processor.register(prepared(taken))
    assert processor.num_unfinished_requests == 1


def test_metrics_and_cache_hits_are_those_of_the_whole_request() -> None:
    run = Run(n=2)
    run.feed(news([], "0_r", first_scheduled_time=10.5, num_cached_tokens=4))
    run.feed(news(b"b", "1_r", first_scheduled_time=10.7, num_cached_tokens=6))
    run.feed(news(b"a", "0_r", finish_reason=FinishReason.LENGTH))
    run.feed(news([], "1_r", finish_reason=FinishReason.LENGTH))
    output = run.outputs[0]
    assert output.num_cached_tokens == 4
    assert output.metrics is not None
    assert output.metrics.queue_time == 0.5
    assert output.metrics.time_to_first_token == 2.0
    assert output.metrics.finished_time == 14.0


TOKENS = st.sampled_from([*EMOJI, *b"ab ", 0xFF, tiny.BOS_TOKEN_ID])


@given(
    st.lists(TOKENS, min_size=1, max_size=30),
    st.lists(st.integers(1, 6), min_size=30, max_size=30),
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=3), max_size=2),
    st.integers(0, 5),
)
def test_output_does_not_depend_on_how_many_tokens_a_step_brings(
    token_ids: list[int], sizes: list[int], stop: list[str], min_tokens: int
) -> None:  # B070, B074
    params: dict[str, Any] = {"stop": stop, "min_tokens": min_tokens}
    entry = logprobs_of(*(([i], [-float(i)], 1) for i in token_ids))
    whole = Run(logprobs=0, **params).feed(
        news(token_ids, logprobs=entry, finish_reason=FinishReason.LENGTH)
    )
    pieces = Run(OutputKind.DELTA, logprobs=0, **params)
    start = 0
    for size in sizes:
        chunk = slice(start, start + size)
        part = logprobs_of(*(([i], [-float(i)], 1) for i in token_ids[chunk]))
        start += size
        last = FinishReason.LENGTH if start >= len(token_ids) else None
        pieces.feed(news(token_ids[chunk], logprobs=part, finish_reason=last))
        if last:
            break
    deltas = [output.outputs[0] for output in pieces.outputs]
    final = whole.completion
    assert "".join(delta.text for delta in deltas) == final.text
    assert [i for delta in deltas for i in delta.token_ids] == final.token_ids
    assert [p for delta in deltas for p in delta.logprobs or []] == final.logprobs
    ends = [delta for delta in deltas if delta.finish_reason is not None]
    assert [(end.finish_reason, end.stop_reason) for end in ends] == [
        (final.finish_reason, final.stop_reason)
    ]
    assert ends[0].cumulative_logprob == final.cumulative_logprob
    if final.finish_reason is FinishReason.LENGTH:
        assert final.text == byte_tokenizer().decode(token_ids)


FAST, ECHO = "fast", "echo"
IN_FORCE = SpeculationReport(True, {ECHO: 4, FAST: 4}, (ECHO,))
TRACED: dict[str, Any] = {"report": IN_FORCE, "shows_trace": True, "traces_drafts": True}


def step(number: int, proposer: str, drafts: bytes, tokens: bytes, **fields: Any) -> TokenOutput:
    """News of a verified step; the last of `tokens` is the target's own."""
    record = DraftRecord(number, proposer, list(drafts), list(tokens))
    return news(fields.pop("kept", tokens), draft=record, **fields)


# "the quick" in four steps: no drafts; one miss with one behind it; all hit; and a miss at once.
STEPS = [
    step(3, "", b"", b"t"),
    step(4, FAST, b"hex ", b"he "),
    step(7, ECHO, b"qui", b"quic"),
    step(8, FAST, b"xy", b"k", finish_reason=FinishReason.LENGTH),
]
SOURCES = ["target", FAST, FAST, "target", ECHO, ECHO, ECHO, "target", "target"]
STEP_NUMBERS = [3, 4, 4, 4, 7, 7, 7, 7, 8]
REJECTED = [
    RejectedDraft(4, 3, ord("x"), ord(" "), FAST, num_unjudged=1),
    RejectedDraft(8, 8, ord("x"), ord("k"), FAST, num_unjudged=1),
]


def test_a_trace_names_the_source_and_step_of_every_token_and_what_beat_a_draft() -> None:
    run = Run(**TRACED).feed(STEPS[0]).feed(STEPS[1]).feed(STEPS[2]).feed(STEPS[3])
    completion = run.completion
    assert completion.text == "the quick"
    assert completion.speculative_trace == SpeculationTrace(SOURCES, STEP_NUMBERS, REJECTED)
    for rejected in REJECTED:
        assert completion.token_ids[rejected.position] == rejected.sampled_token_id


def test_a_report_counts_what_the_trace_shows() -> None:
    run = Run(**TRACED)
    for output in STEPS:
        run.feed(output)
    report = run.completion.speculative
    assert report is not None
    assert (report.enabled, report.methods, report.num_tokens) == (
        True,
        (ECHO, FAST),
        {ECHO: 4, FAST: 4},
    )
    assert report.stats == SpeculationStats(
        num_steps=4,
        num_tokens=9,
        by_proposer={
            FAST: ProposerStats(2, 6, 2, [2, 2, 1, 1], [1, 1, 0, 0]),
            ECHO: ProposerStats(1, 3, 3, [1, 1, 1], [1, 1, 1]),
        },
    )
    assert report.stats.mean_acceptance_length == 9 / 4
    assert (report.num_accepted_prediction_tokens, report.num_rejected_prediction_tokens) == (3, 0)
    assert IN_FORCE.stats == SpeculationStats()  # the next request begins at zero


def test_a_trace_is_streamed_in_pieces_that_add_up() -> None:
    whole = SpeculationTrace()
    run = Run(OutputKind.DELTA, **TRACED)
    for output in STEPS:
        run.feed(output)
    for output in run.outputs:
        (piece,) = output.outputs
        assert piece.speculative_trace is not None
        assert len(piece.speculative_trace.sources) == len(piece.token_ids)
        assert (piece.speculative is not None) == piece.is_finished
        whole.sources += piece.speculative_trace.sources
        whole.steps += piece.speculative_trace.steps
        whole.rejected += piece.speculative_trace.rejected
    assert whole == SpeculationTrace(SOURCES, STEP_NUMBERS, REJECTED)


def test_cumulative_traces_grow_and_earlier_ones_stay_as_they_were() -> None:
    run = Run(OutputKind.CUMULATIVE, **TRACED)
    for output in STEPS:
        run.feed(output)
    traces = [output.outputs[0].speculative_trace for output in run.outputs]
    for trace, count in zip(traces, (1, 4, 8, 9)):
        assert trace is not None
        assert trace.sources == SOURCES[:count]


@pytest.mark.parametrize(
    ("stop", "num_tokens", "drafts", "num_rejected"),
    [
        ("q", 5, [1, 1], 1),  # the first of an accepted run
        ("ui", 7, [3, 3], 1),  # the last of one
        ("ic", 8, [3, 3], 1),  # the target's own behind it
        ("he", 3, [], 0),  # in front of a draft that was rejected
        ("e ", 4, [], 1),  # with what was sampled instead
    ],
)
def test_a_stop_string_within_an_accepted_run_cuts_trace_and_counts(
    stop: str, num_tokens: int, drafts: list[int], num_rejected: int
) -> None:  # B004
    run = Run(stop=[stop], **TRACED)
    for output in STEPS:
        run.feed(output)
    completion = run.completion
    assert completion.token_ids == list(b"the quick")[:num_tokens]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)
    trace, report = completion.speculative_trace, completion.speculative
    assert trace is not None
    assert report is not None
    assert trace.sources == SOURCES[:num_tokens]
    assert trace.steps == STEP_NUMBERS[:num_tokens]
    assert trace.rejected == REJECTED[:num_rejected]
    assert report.stats.num_tokens == num_tokens
    num_accepted = sum(s.num_accepted_tokens for s in report.stats.by_proposer.values())
    assert num_accepted == sum(source != "target" for source in trace.sources)
    echo = report.stats.by_proposer.get(ECHO)
    assert ([echo.num_draft_tokens, echo.num_accepted_tokens] if echo else []) == drafts


def test_a_run_that_the_core_cut_at_max_tokens_is_cut_in_trace_and_counts() -> None:
    run = Run(max_tokens=3, **TRACED).feed(STEPS[0])
    run.feed(step(4, FAST, b"he q", b"he q!", kept=b"he", finish_reason=FinishReason.LENGTH))
    completion = run.completion
    assert completion.speculative_trace == SpeculationTrace(["target", FAST, FAST], [3, 4, 4], [])
    report = completion.speculative
    assert report is not None
    assert report.stats.by_proposer == {FAST: ProposerStats(1, 2, 2, [1, 1], [1, 1])}


def test_without_a_trace_the_core_does_the_counting() -> None:
    counted = SpeculationStats(3, 7, {FAST: ProposerStats(2, 8, 4, [2], [2])})
    run = Run(report=IN_FORCE).feed(news(b"abcd"))
    run.feed(news(b"efg", finish_reason=FinishReason.LENGTH, speculation=counted))
    assert run.completion.speculative_trace is None
    assert run.completion.speculative == dataclasses.replace(IN_FORCE, stats=counted)


def test_a_core_that_runs_on_behind_a_stop_string_does_not_change_the_counts() -> None:
    late = SpeculationStats(9, 9)
    run = Run(stop=["q"], report=IN_FORCE, traces_drafts=True).feed(STEPS[0]).feed(STEPS[1])
    last = dataclasses.replace(STEPS[2], finish_reason=FinishReason.LENGTH, speculation=late)
    report = run.feed(last).completion.speculative
    assert report is not None
    assert (report.stats.num_steps, report.stats.num_tokens) == (3, 5)
    assert run.completion.speculative_trace is None  # counted, but not asked for


def test_each_of_n_choices_has_a_report_and_a_trace_of_its_own() -> None:
    run = Run(n=2, **TRACED)
    run.feed(step(1, FAST, b"a", b"ab", request_id="0_r"), step(1, "", b"", b"c", request_id="1_r"))
    run.feed(step(2, ECHO, b"x", b"y", request_id="1_r", finish_reason=FinishReason.LENGTH))
    run.feed(step(3, "", b"", b"z", request_id="0_r", finish_reason=FinishReason.LENGTH))
    first, second = run.outputs[0].outputs
    assert first.speculative_trace == SpeculationTrace([FAST, "target", "target"], [1, 1, 3], [])
    assert second.speculative_trace == SpeculationTrace(
        ["target", "target"], [1, 2], [RejectedDraft(2, 1, ord("x"), ord("y"), ECHO, 0)]
    )
    assert first.speculative is not None
    assert second.speculative is not None
    assert (first.speculative.stats.num_steps, second.speculative.stats.num_steps) == (2, 2)
    assert first.speculative.num_rejected_prediction_tokens == 0
    assert second.speculative.num_rejected_prediction_tokens == 1


def test_completions_are_equal_however_they_were_speculated() -> None:
    run = Run(**TRACED)
    for output in STEPS:
        run.feed(output)
    plain = Run().feed(news(b"the quick", finish_reason=FinishReason.LENGTH))
    assert run.completion == plain.completion
    assert plain.completion.speculative is None
