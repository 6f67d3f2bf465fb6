"""Where other engines refuse, ignore or get wrong what is asked of them once they speculate.

What each test is about was found in their source and in their users' threads. Targets, engines and
the reference `plain` are those of test_speculation_reports.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from nano import LLM, SamplingParams
from nano.layers.native_kernels import NativeKernels
from nano.outputs import FinishReason
from nano.speculation import TARGET
from tests.engine.naive import NaiveEngine
from tests.engine.test_speculation_reports import (
    ASCII,
    GREEDY,
    OFF,
    SAMPLED,
    ask,
    by,
    completions,
    draft_model,
    ids,
    longest_walk,
    make_echo,
    make_llm,
    make_other,
    make_target,
    ngram,
    num_accepted,
    num_drafted,
    plans_of,
    stream,
    tokens,
)
from tests.tiny import EOS_TOKEN_ID

pytestmark = pytest.mark.skipif(
    not NativeKernels.is_available(), reason="bits are promised on our own kernels"
)

SUFFIX = {"method": "suffix", "suffix_decoding_min_token_prob": 0.0, "num_speculative_tokens": 8}
COARSE = {"method": "self_quant", "quantization": "int8", "num_speculative_tokens": 8}
MODELS = ("same", "other", "self_quant")


class Scripted:
    """Offers up to `len(known) % 5` drafts: the right ones, but the last of them wrong."""

    TEXTS: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # prompt -> what follows
    NUM_PROMPT_TOKENS = 4

    def __init__(self, options: Any) -> None:
        pass

    def propose(self, request_id: str, token_ids: np.ndarray, num_tokens: int) -> list[int]:
        known = token_ids.tolist()
        text = self.TEXTS[tuple(known[: self.NUM_PROMPT_TOKENS])]
        num_output = len(known) - self.NUM_PROMPT_TOKENS
        drafts = text[num_output : num_output + min(num_tokens, len(known) % 5)]
        return [*drafts[:-1], (drafts[-1] + 1) % 256] if drafts else []


SCRIPTED = {"method": "custom_class", "name": "scripted", "model": f"{__name__}:Scripted"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def proposers(target: Path, other: Path) -> list[dict[str, Any]]:
    models = [draft_model("same", target), draft_model("other", other), COARSE]
    return [ngram(), SUFFIX, *models]


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[LLM]:
    with make_llm(target, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(target: Path, proposers: list[dict[str, Any]]) -> Iterator[LLM]:
    with make_llm(target, proposers) as llm:
        yield llm


@pytest.fixture(scope="module")
def naive(target: Path) -> NaiveEngine:
    return NaiveEngine(target)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_echo(tmp_path_factory.mktemp("echo"))


# --- parameters that are refused, ignored or "relaxed" elsewhere --------------------------------

PROMPT = tokens(9, 3)
FREE: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 24,
    "ignore_eos": True,
    "logprobs": 2,
}
SURE = FREE | {"temperature": 0.0}
LETTERS = (*range(97, 123),)


def parameter_rows(plain: LLM) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """name -> (parameters without it, with it); chosen so that it bites in the midst of a text."""
    (free,), (sure,) = (ids(ask(plain, [PROMPT], SamplingParams(**p))) for p in (FREE, SURE))
    few: dict[str, Any] = {"allowed_token_ids": LETTERS}
    text = ask(plain, [PROMPT], SamplingParams(**SURE, **few))[0].outputs[0].text
    return {
        "min_p": (FREE, {"min_p": 0.3}),
        "logit_bias": (FREE, {"logit_bias": {free[5]: -100.0, 65: 2.0}}),
        "presence_penalty": (SURE | few, {"presence_penalty": 2.0}),
        "frequency_penalty": (FREE | few, {"frequency_penalty": 1.5}),
        "repetition_penalty": (SURE | few, {"repetition_penalty": 1.5}),
        "bad_words": (SURE | few, {"bad_words": (text[5:7], text[9])}),
        "allowed_token_ids": (FREE, {"allowed_token_ids": LETTERS}),
        "min_tokens": (SURE | {"stop_token_ids": (sure[3], sure[8])}, {"min_tokens": 6}),
        "top_p": (FREE, {"top_p": 0.5}),
        "top_k": (FREE, {"top_k": 3}),
        "temperature": (SURE, {"temperature": 0.7}),
        "seed": (FREE, {"seed": 2**62 + 1}),
    }


NAMES = (
    "min_p logit_bias presence_penalty frequency_penalty repetition_penalty bad_words "
    "allowed_token_ids min_tokens top_p top_k temperature seed"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_acts_at_every_drafted_position(
    llm: LLM, plain: LLM, naive: NaiveEngine, name: str
) -> None:
    without, with_it = parameter_rows(plain)[name]
    params = SamplingParams(**(without | with_it))
    expected = completions(ask(plain, [PROMPT], params))
    (text,) = (output.token_ids for output in expected)
    (unchanged,) = ids(ask(plain, [PROMPT], SamplingParams(**without)))
    assert text != unchanged
    first_change = next(
        (i for i, (ours, theirs) in enumerate(zip(text, unchanged)) if ours != theirs),
        min(len(text), len(unchanged)),
    )
    if name == "bad_words":  # naive does not know them
        assert not any(word in bytes(text).decode() for word in params.bad_words)
    else:
        assert text == naive.generate(PROMPT, params, (EOS_TOKEN_ID,))
    for method in ("ngram", "suffix", *MODELS):
        outputs = ask(llm, [PROMPT], params, speculative=by(method), speculative_trace=True)
        assert completions(outputs) == expected, method
        if method == "same":  # the first token that differs had been guessed, and the guess held
            assert num_accepted(outputs) == num_drafted(outputs) > 0
            (output,) = completions(outputs)
            assert output.speculative_trace.sources[max(first_change, 1)] == "same"


@pytest.mark.parametrize("method", ["ngram", *MODELS])
def test_drafted_rows_of_unlike_requests_keep_their_own_parameters(
    llm: LLM, plain: LLM, method: str
) -> None:
    rows = parameter_rows(plain)
    params = [SamplingParams(**(without | with_it)) for without, with_it in rows.values()]
    params += [
        replace(GREEDY, logprobs=5),
        replace(SAMPLED, prompt_logprobs=3),
        replace(SAMPLED, n=3),
    ]
    prompts = [PROMPT] * len(params)
    outputs = ask(llm, prompts, params, speculative=by(method))
    expected = ask(plain, prompts, params)
    assert completions(outputs) == completions(expected)
    assert [o.prompt_logprobs for o in outputs] == [o.prompt_logprobs for o in expected]
    assert num_drafted(outputs) > 0


def test_each_of_many_choices_has_its_own_seed_and_its_own_report(llm: LLM, plain: LLM) -> None:
    for method in MODELS:
        params = replace(SAMPLED, seed=30, n=4)
        (output,) = ask(llm, [PROMPT], params, speculative=by(method))
        assert len({*map(tuple, ids([output]))}) == 4
        for index, choice in enumerate(output.outputs):
            alone = ask(plain, [PROMPT], replace(SAMPLED, seed=30 + index))[0].outputs[0]
            assert replace(choice, index=0) == alone
            stats = choice.speculative.stats
            assert stats.num_tokens == len(choice.token_ids) == 24
            assert 0 < stats.by_proposer[method].num_drafts < stats.num_steps <= 24


# --- other requests in the same steps -----------------------------------------------------------


@pytest.mark.parametrize("method", ["ngram", "suffix", *MODELS])
def test_preempted_requests_go_on_with_drafts_and_lose_no_count(
    target: Path, plain: LLM, proposers: list[dict[str, Any]], method: str
) -> None:
    prompts = [tokens(20 + i, i) for i in range(8)]
    params = [replace(SAMPLED if i % 2 else GREEDY, seed=i, max_tokens=30) for i in range(8)]
    small: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 24, "max_model_len": 128}
    with make_llm(target, proposers, scheduling_policy="priority", **small) as llm:
        outputs = ask(
            llm,
            prompts,
            params,
            priority=[i % 3 for i in range(8)],
            speculative=by(method, 4),
            speculative_trace=True,
        )
        stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["kv_cache_usage"] == 0
    assert completions(outputs) == completions(ask(plain, prompts, params))
    for output in completions(outputs):
        assert output.speculative.stats.num_tokens == len(output.token_ids)
        trace = output.speculative_trace
        assert len(trace.sources) == len(trace.steps) == len(output.token_ids)
        assert trace.steps == sorted(trace.steps)
    if method == "same":
        assert num_accepted(outputs) == num_drafted(outputs) > 100


def test_a_draft_model_costs_no_hit_of_the_prefix_cache(
    target: Path, proposers: list[dict[str, Any]]
) -> None:
    hits = []
    for drafts in ([], proposers):
        with make_llm(target, drafts) as llm:
            cached = []
            for method in ("other", "self_quant", "same"):
                wish = by(method) if drafts else None
                for user in range(3):
                    prompt = tokens(40) + tokens(10, user)
                    for _ in range(3):  # turns of a chat
                        (output,) = ask(llm, [prompt], GREEDY, speculative=wish)
                        cached.append(output.num_cached_tokens)
                        prompt = prompt + output.outputs[0].token_ids + tokens(7, len(prompt))
                llm.reset_prefix_cache()
            stats = llm.stats()
            hits.append((cached, stats["num_prefix_hit_tokens"], stats["num_prefix_query_tokens"]))
    assert hits[0] == hits[1]
    assert hits[0][1] > 0.5 * hits[0][2]


def test_a_prefix_that_no_draft_model_has_read_is_read_before_drafts_go_on(target: Path) -> None:
    """Its blocks held draft KV of another text before."""
    small: dict[str, Any] = {"block_size": 8, "num_gpu_blocks_override": 12, "max_model_len": 96}
    with make_llm(target, [draft_model("same", target)], **small) as llm:
        for seed in (1, 2):  # all twelve blocks
            ask(llm, [tokens(60, seed)])
        ask(llm, [tokens(60, 3)], speculative=OFF)
        outputs = ask(llm, [tokens(60, 3)])
    assert outputs[0].num_cached_tokens == 56
    assert num_accepted(outputs) == num_drafted(outputs) > 15


def test_a_stream_keeps_its_drafts_while_long_prompts_come_in_pieces(
    target: Path, plain: LLM, proposers: list[dict[str, Any]]
) -> None:
    params = replace(GREEDY, max_tokens=60)
    prompts = [PROMPT, tokens(300, 1), tokens(200, 2)]
    with make_llm(target, proposers, max_num_batched_tokens=32) as llm, plans_of(llm) as plans:
        outputs = ask(llm, prompts, params, speculative=by("same", 4), speculative_trace=True)
    assert completions(outputs) == completions(ask(plain, prompts, params))
    trace = completions(outputs)[0].speculative_trace
    num_tokens = Counter(trace.steps)
    mixed = [
        plan.step
        for plan in plans
        if plan.step in num_tokens
        and any(
            count > 5 and request_id not in plan.draft_token_ids
            for request_id, count in plan.num_scheduled_tokens.items()
        )
    ]
    assert len(mixed) > 8
    assert sum(num_tokens[step] == 5 for step in mixed) > 0.7 * len(mixed)


@pytest.mark.parametrize("method", ["ngram", "suffix", *MODELS])
def test_an_abort_in_the_midst_of_drafts_leaves_nothing_behind(
    target: Path, plain: LLM, proposers: list[dict[str, Any]], method: str
) -> None:
    survivors = [tokens(12, 1), tokens(20, 2)]
    expected = completions(ask(plain, survivors))
    with make_llm(target, proposers, max_num_seqs=3, block_size=4) as llm:
        for num_pieces in (1, 2, 3):
            wish = by(method)
            doomed = stream(
                llm, tokens(30, 3) + [1, 2, 3] * 4, replace(GREEDY, max_tokens=90), speculative=wish
            )
            others = stream(llm, survivors[0], speculative=wish)
            first = next(others)
            for _ in range(num_pieces):
                next(doomed)
            doomed.close()
            rest = [token_id for piece in others for token_id in piece.outputs[0].token_ids]
            assert first.outputs[0].token_ids + rest == expected[0].token_ids
            assert llm.stats()["kv_cache_usage"] == 0
            # Whoever gets its row and its blocks finds no KV of its guesses.
            outputs = ask(llm, survivors, speculative=wish)
            assert completions(outputs) == expected
            if method == "same":
                assert num_accepted(outputs) == num_drafted(outputs) > 0


def test_as_many_requests_run_at_once_as_without_proposers(llm: LLM) -> None:
    prompts = [tokens(3, i) for i in range(100)]
    running = stream(llm, prompts, speculative=by("ngram"))
    next(running)
    stats = llm.stats()
    running.close()
    assert (stats["num_running"], stats["num_waiting"]) == (100, 0)


# --- who guesses, and how much ------------------------------------------------------------------


LIMITS = {"ngram": 2, "suffix": 8, "same": 4, "other": 3, "self_quant": 5}


def test_each_request_of_a_batch_has_its_own_methods_and_length(
    target: Path, plain: LLM, proposers: list[dict[str, Any]]
) -> None:
    asked: list[tuple[dict[str, Any] | None, dict[str, int]]] = [  # a wish, and what it comes to
        (OFF, {}),
        ({"num_tokens": 0}, dict.fromkeys(LIMITS, 0)),
        *((by(name, k), {name: k}) for name, most in LIMITS.items() for k in (1, most)),
        ({"methods": ["suffix", "same"], "num_tokens": 6}, {"suffix": 6, "same": 4}),
        ({"methods": ["other", "ngram"]}, {"other": 3, "ngram": 2}),
        (None, LIMITS),
    ]
    prompts = [tokens(2 + i, i) * 3 for i in range(len(asked))]
    expected = completions(ask(plain, prompts))
    drafts = [
        options | {"num_speculative_tokens": LIMITS[options.get("name", options["method"])]}
        for options in proposers
    ]
    with make_llm(target, drafts) as llm:
        for _ in range(2):  # the second time over past outputs
            wishes = [wish for wish, _ in asked]
            outputs = completions(ask(llm, prompts, speculative=wishes, speculative_trace=True))
            assert outputs == expected
            for (_, limits), output in zip(asked, outputs):
                report = output.speculative
                assert report.num_tokens == limits
                assert {*output.speculative_trace.sources} <= {TARGET, *limits}
                for name, stats in report.stats.by_proposer.items():
                    assert 0 < len(stats.num_offered_per_pos) <= limits[name]
            used = Counter(
                name for output in outputs for name in output.speculative.stats.by_proposer
            )
            assert {*used} == {*LIMITS}
            assert not outputs[0].speculative.stats.by_proposer


def test_positions_are_counted_against_the_drafts_offered_there(target: Path, plain: LLM) -> None:
    params = replace(GREEDY, max_tokens=40)
    prompts = [tokens(Scripted.NUM_PROMPT_TOKENS, seed) for seed in (11, 12, 13)]
    texts = ids(ask(plain, prompts, params))
    Scripted.TEXTS = {tuple(prompt): text for prompt, text in zip(prompts, texts)}
    most = 6
    options = {**SCRIPTED, "num_speculative_tokens": most}
    with make_llm(target, [options]) as llm:
        outputs = ask(llm, prompts, params, speculative_trace=True)
        stats = llm.stats()
    assert ids(outputs) == texts
    offered, accepted = [0] * most, [0] * most
    num_drafts = 0
    for output in completions(outputs):
        # By hand: after n tokens of output there are (4 + n) % 5 drafts, all but the last right.
        n, mine = 1, 0
        while n < 40:
            num_offered = min((4 + n) % 5, 40 - n - 1)
            for position in range(num_offered):
                offered[position] += 1
                accepted[position] += position < num_offered - 1
            num_drafts += num_offered > 0
            mine += 1
            n += max(num_offered - 1, 0) + 1
        report = output.speculative.stats
        assert report.num_steps == mine + 1
        assert report.num_tokens == 40
    reports = [output.speculative.stats.by_proposer["scripted"] for output in completions(outputs)]
    assert sum(report.num_drafts for report in reports) == num_drafts
    assert offered[0] > offered[1] > offered[2] > 0 < accepted[0] < offered[0]
    for position in range(most):
        for name, wanted in (("num_draft", offered), ("num_accepted", accepted)):
            key = f'spec_decode_{name}_tokens_per_pos{{position="{position}"}}'
            assert stats.get(key, 0) == wanted[position], key
        for name, wanted in (("num_offered", offered), ("num_accepted", accepted)):
            lists = [getattr(report, f"{name}_per_pos") for report in reports]
            assert sum(x[position] for x in lists if position < len(x)) == wanted[position]
    assert stats["spec_decode_num_drafts"] == num_drafts


def test_no_text_of_one_cache_salt_is_guessed_for_another(target: Path, plain: LLM) -> None:
    prompt, params = list(range(20)), replace(GREEDY, max_tokens=30)
    expected = completions(ask(plain, [prompt], params))
    reports = {}
    with make_llm(target, [SUFFIX]) as llm:
        for name, salt in (("first", "a"), ("stranger", "b"), ("nobody", None), ("again", "a")):
            salted = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
            outputs = ask(llm, [salted], params)
            assert completions(outputs) == expected
            reports[name] = outputs[0].outputs[0].speculative.stats
    assert reports["stranger"] == reports["nobody"] == reports["first"]
    again = reports["again"].by_proposer["suffix"]
    assert again.num_accepted_tokens > 15
    assert reports["again"].num_steps < reports["first"].num_steps / 2


@pytest.mark.parametrize("method", ["ngram", "suffix", "same", "prediction"])
def test_what_comes_after_a_stop_string_in_an_accepted_run_is_nowhere(
    echo: Path, method: str
) -> None:
    drafts = [ngram(), SUFFIX, draft_model("same", echo)]
    with make_llm(echo, drafts) as llm:
        walk = longest_walk(llm)
        prompt = walk + walk[:1]
        (whole,) = ask(llm, [prompt], ASCII, speculative=OFF)
        text = whole.outputs[0].text
        more = {"prediction": text} if method == "prediction" else {}
        for end in range(8, 14):
            params = replace(ASCII, stop=(text[end - 3 : end], "never"), logprobs=2)
            (off,) = ask(llm, [prompt], params, speculative=OFF)
            (on,) = ask(llm, [prompt], params, speculative={"method": method}, **more)
            assert on.outputs == off.outputs
            (output,) = on.outputs
            assert output.finish_reason == FinishReason.STOP
            assert output.token_ids == whole.outputs[0].token_ids[:end]
            assert len(output.logprobs) == end
            assert num_accepted([on]) >= 4
            report = output.speculative.stats
            assert report.num_tokens == end  # and no draft behind the stop counts
            assert report.num_steps + num_accepted([on]) in (end, end + 1)
