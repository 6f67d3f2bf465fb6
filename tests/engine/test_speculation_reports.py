"""What users of other engines reported about speculation (ids like B001), each as a test.

`plain` is an engine without speculation and without a prefix cache: what it answers is right.
Tokens and logprobs are compared with it bit by bit.

Two targets. M is random. "echo" is M with its attention turned down until a token depends almost on
the one before it alone: it repeats what it has read, as in copying, so that guesses from text are
often right, while any wrong KV still shows in the last bits of a logprob.
"""

import itertools
import json
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano import LLM, SamplingParams
from nano.errors import ConfigError
from nano.layers.native_kernels import NativeKernels
from nano.outputs import FinishReason, RequestOutput
from nano.step import StepPlan
from tests.engine.naive import NaiveEngine
from tests.tiny import make_checkpoint

pytestmark = pytest.mark.skipif(
    not NativeKernels.is_available(), reason="bits are promised on our own kernels"
)

NUM_TOKENS = 8
OFF = {"enabled": False}
PRINTABLE = tuple(range(32, 127))
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=24, ignore_eos=True, logprobs=1)
SAMPLED = replace(GREEDY, temperature=1.0)
ASCII = replace(GREEDY, allowed_token_ids=PRINTABLE, max_tokens=40)


def make_target(folder: Path, **config: Any) -> Path:
    return make_checkpoint(folder, "llama", **config)


def make_other(folder: Path, **config: Any) -> Path:
    """Another architecture and other weights over the same vocabulary: its guesses are wrong."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32}
    return make_checkpoint(folder, "qwen2", seed=5, **(sizes | config))


def make_echo(folder: Path, **config: Any) -> Path:
    weights = load_file(make_target(folder, **config) / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name:
            weight *= 0.001
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_llm(target: Path, proposers: Sequence[dict[str, Any]] = (), **engine_args: Any) -> LLM:
    """`proposers` draft as much as they may, whether or not it pays."""
    config = {"proposers": list(proposers), "draft_length": "static"} if proposers else None
    defaults = {"max_model_len": 512, "max_num_batched_tokens": 8192}
    return LLM(target, speculative_config=config, **(defaults | engine_args))


def draft_model(
    name: str, folder: Path, num_tokens: int = NUM_TOKENS, **more: Any
) -> dict[str, Any]:
    options = {"method": "draft_model", "name": name, "model": str(folder)}
    return {**options, "num_speculative_tokens": num_tokens, **more}


def ngram(num_tokens: int = NUM_TOKENS, low: int = 1) -> dict[str, Any]:
    lengths = {"prompt_lookup_min": low, "prompt_lookup_max": 4}
    return {"method": "ngram", "num_speculative_tokens": num_tokens, **lengths}


def by(method: str, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """The wish to be drafted for by `method` alone."""
    return {"method": method, "num_tokens": num_tokens}


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


# Answers are typed Any: what a test asked for is there, though for others it may be None.
def ask(llm: LLM, prompts: Any, params: Any = GREEDY, **wishes: Any) -> list[Any]:
    return [*llm.generate(prompts, params, use_tqdm=False, **wishes)]


def stream(llm: LLM, prompt: Any, params: Any = GREEDY, **wishes: Any) -> Any:
    return llm.generate(prompt, params, stream=True, **wishes)


def completions(outputs: Sequence[RequestOutput]) -> list[Any]:
    """All `CompletionOutput`s."""
    return [completion for output in outputs for completion in output.outputs]


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for completion in completions(outputs)]


def num_drafted(outputs: Sequence[RequestOutput]) -> int:
    """Drafts that the outputs' own reports tell of."""
    return sum(
        stats.num_draft_tokens
        for completion in completions(outputs)
        for stats in completion.speculative.stats.by_proposer.values()
    )


def num_accepted(outputs: Sequence[RequestOutput]) -> int:
    return sum(
        stats.num_accepted_tokens
        for completion in completions(outputs)
        for stats in completion.speculative.stats.by_proposer.values()
    )


@contextmanager
def plans_of(llm: LLM) -> Iterator[list[StepPlan]]:
    """The plans that an engine executes meanwhile."""
    client: Any = llm._client
    executor = client._core._executor
    execute = executor.execute
    plans: list[StepPlan] = []

    def watch(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    executor.execute = watch
    try:
        yield plans
    finally:
        executor.execute = execute


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_other(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def plain(target: Path) -> Iterator[LLM]:
    with make_llm(target, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(target: Path, other: Path) -> Iterator[LLM]:
    drafts = [ngram(), draft_model("same", target), draft_model("other", other)]
    with make_llm(target, drafts) as llm:
        yield llm


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_echo(tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="module")
def plain_echo(echo: Path) -> Iterator[LLM]:
    with make_llm(echo, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def echo_llm(echo: Path) -> Iterator[LLM]:
    with make_llm(echo, [ngram(), draft_model("same", echo)]) as llm:
        yield llm


@pytest.fixture(scope="module")
def walk(plain_echo: LLM) -> list[int]:
    """The longest greedy text of printable characters in which none comes twice: said again from
    its beginning, it goes on as before."""
    return longest_walk(plain_echo)


def longest_walk(plain: LLM) -> list[int]:
    starts = [[token_id] for token_id in PRINTABLE]
    texts = [start + text for start, text in zip(starts, ids(ask(plain, starts, ASCII)))]
    return max(map(_without_repeats, texts), key=len)


def _without_repeats(text: list[int]) -> list[int]:
    num_new = next((i for i, token_id in enumerate(text) if token_id in text[:i]), len(text))
    return text[:num_new]


# --- the same tokens ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twenty(plain: LLM) -> tuple[list[list[int]], list[RequestOutput]]:
    prompts = [tokens(1 + 2 * i, i) for i in range(20)]
    return prompts, ask(plain, prompts, replace(GREEDY, max_tokens=128))


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize("method", ["same", "other", "ngram"])
def test_greedy_text_is_the_targets_own_however_bad_the_drafts(
    llm: LLM, twenty: Any, method: str, num_tokens: int
) -> None:  # B001
    prompts, expected = twenty
    wish = by(method, num_tokens)
    together = ask(llm, prompts, replace(GREEDY, max_tokens=128), speculative=wish)
    assert completions(together) == completions(expected)
    alone = [ask(llm, [p], replace(GREEDY, max_tokens=9), speculative=wish)[0] for p in prompts]
    for output, whole in zip(alone, expected):
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids[:9]
        assert output.outputs[0].logprobs == whole.outputs[0].logprobs[:9]
    accepted, drafted = num_accepted(together), num_drafted(together)
    if method == "same":
        assert accepted == drafted > 1000
    elif method == "other":
        assert accepted < 0.05 * drafted


@pytest.mark.parametrize("method", ["other", "ngram"])
def test_a_seed_gives_the_same_text_alone_and_beside_unseeded_requests(
    llm: LLM, plain: LLM, method: str
) -> None:  # B015
    prompt, params = tokens(12), replace(SAMPLED, seed=42, max_tokens=32)
    expected = completions(ask(plain, [prompt], params))
    for _ in range(5):
        assert completions(ask(llm, [prompt], params, speculative=by(method, 4))) == expected
        others = [tokens(5 + i, i) for i in range(4)]
        beside = ask(
            llm,
            [*others[:2], prompt, *others[2:]],
            [replace(SAMPLED, seed=None)] * 2 + [params] + [replace(SAMPLED, seed=None)] * 2,
            speculative=by(method, 4),
        )
        assert completions([beside[2]]) == expected


@pytest.mark.parametrize("method", ["ngram", "other", "same"])
def test_a_batch_of_seeded_and_unseeded_requests_has_sense_in_every_row(
    llm: LLM, plain: LLM, method: str
) -> None:  # B016
    prompt = "Count: one, two, three,"
    params = [
        replace(SAMPLED, temperature=0.1, seed=seed, max_tokens=40) for seed in (1, None, 2, None)
    ]
    outputs = ask(llm, [prompt] * 4, params, speculative=by(method, 4))
    assert num_drafted(outputs) > 0
    for output, asked in zip(completions(outputs), params):
        assert asked.seed in (None, output.seed)
        assert [0] * 4 not in [output.token_ids[i : i + 4] for i in range(40)]
        # The seed that was drawn explains the text.
        assert [output] == completions(ask(plain, [prompt], replace(asked, seed=output.seed)))


@pytest.mark.parametrize("wish", [OFF, by("ngram", 4), by("other", 4)])
def test_unseeded_requests_do_not_repeat_one_another(
    target: Path, other: Path, wish: dict[str, Any]
) -> None:  # B017
    prompt, params = "Once upon a", SamplingParams(temperature=1.0, max_tokens=12)
    starts = []
    for engine_seed in (0, 0, 1):  # restarted, and restarted with another seed
        drafts = [ngram(), draft_model("other", other)]
        with make_llm(target, drafts, seed=engine_seed) as llm:
            one_by_one = [ids(ask(llm, [prompt], params, speculative=wish))[0] for _ in range(20)]
            at_once = ids(ask(llm, [prompt] * 20, params, speculative=wish))
        assert len({*map(tuple, one_by_one)}) >= 15
        assert len({*map(tuple, at_once)}) >= 15
        assert len({*map(tuple, one_by_one + at_once)}) >= 30
        starts.append(one_by_one[0])
    assert starts[0] == starts[1] != starts[2]


@pytest.mark.parametrize("method", ["same", "ngram"])
def test_drafts_go_to_their_own_blocks_in_a_fragmented_cache(
    echo: Path, plain_echo: LLM, method: str
) -> None:  # B021
    rng = random.Random(8)
    drafts = [ngram(6), draft_model("same", echo, 6)]
    with make_llm(echo, drafts, block_size=4, num_gpu_blocks_override=40, max_model_len=128) as llm:
        running: list[Any] = []
        for i in range(30):
            prompt = tokens(rng.randint(5, 60), i)
            params = replace(GREEDY, max_tokens=12)
            running.append(stream(llm, prompt, params, speculative=by(method, 6)))
            next(running[-1])
            if i % 3 == 2:
                running.pop(rng.randrange(len(running))).close()  # aborts it
            elif len(running) > 2:
                assert list(running.pop(0))
        for left in running:
            left.close()
        pattern = tokens(5, 99)
        prompts = [pattern * 4 + tokens(i, i) + pattern for i in range(4)]
        params = replace(GREEDY, max_tokens=30)
        for prompt in prompts:
            with plans_of(llm) as plans:
                outputs = ask(llm, [prompt], params, speculative=by(method, 6))
            assert completions(outputs) == completions(ask(plain_echo, [prompt], params))
            assert num_accepted(outputs) > 10
            blocks = plans[0].new_requests[0].block_ids
            assert any(after != before + 1 for before, after in itertools.pairwise(blocks))
        assert llm.stats()["kv_cache_usage"] == 0


def test_rows_with_and_without_drafts_share_a_step(
    echo: Path, plain_echo: LLM, walk: list[int]
) -> None:  # B026
    prompts = [
        walk + walk[:1],
        walk[5:] + walk[5:6],
        [1],
        [2, 3],
        walk[2:] + walk[2:3],
        tokens(100),
    ]
    params = [replace(ASCII, max_tokens=1 if i == 4 else 20) for i in range(6)]
    expected = [ask(plain_echo, [p], one)[0] for p, one in zip(prompts, params)]
    with make_llm(echo, [ngram(5)], max_num_batched_tokens=48) as llm, plans_of(llm) as plans:
        outputs = ask(llm, prompts, params)
    assert completions(outputs) == completions(expected)
    assert num_accepted(outputs[:2]) > 10
    assert num_drafted(outputs[4:5]) == 0
    # Rows with drafts, without, and a piece of a prompt in one step.
    assert any(
        plan.draft_token_ids
        and len(plan.draft_token_ids) < len(plan.num_scheduled_tokens)
        and any(
            count > 1 and request_id not in plan.draft_token_ids
            for request_id, count in plan.num_scheduled_tokens.items()
        )
        for plan in plans
    )


# --- where a request ends ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def seven(plain: LLM) -> tuple[list[int], list[int]]:
    """A prompt whose greedy text begins with seven tokens all different, and these."""
    prompts = [tokens(10, seed) for seed in range(20)]
    starts = [output[:7] for output in ids(ask(plain, prompts))]
    index = next(i for i, start in enumerate(starts) if len({*start}) == 7)
    return prompts[index], starts[index]


@pytest.mark.parametrize("place", range(7))
def test_a_stop_token_anywhere_in_a_run_of_accepted_drafts_is_the_last_token(
    llm: LLM, plain: LLM, seven: Any, place: int
) -> None:  # B002
    prompt, start = seven
    params = replace(GREEDY, stop_token_ids=(start[place],), max_tokens=50, logprobs=2)
    (output,) = completions(ask(llm, [prompt], params, speculative=by("same", 5)))
    assert output.token_ids == start[: place + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, start[place])
    assert len(output.logprobs) == place + 1
    assert [output] == completions(ask(plain, [prompt], params))
    stats = output.speculative.stats
    assert stats.num_tokens == place + 1
    assert stats.num_steps == (1 if place == 0 else 2)  # the seventh is the bonus of five drafts


def test_an_end_of_sequence_in_a_run_of_accepted_drafts_ends_the_text(
    tmp_path: Path, seven: Any
) -> None:  # B002
    prompt, start = seven
    folder = make_target(tmp_path / "ends", eos_token_id=start[3])
    with make_llm(folder, [draft_model("same", folder, 5)]) as llm:
        (output,) = completions(ask(llm, [prompt], replace(GREEDY, ignore_eos=False)))
    assert output.token_ids == start[:4]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, None)
    assert len(output.logprobs) == 4
    assert output.speculative.stats.num_steps == 2


@pytest.mark.parametrize("method", ["same", "ngram"])
@pytest.mark.parametrize("shown", [False, True])
def test_text_ends_at_the_first_stop_string_though_drafts_go_on(
    echo_llm: LLM, plain_echo: LLM, walk: list[int], method: str, shown: bool
) -> None:  # B004
    assert len(walk) > 16
    prompt = walk + walk[:1]  # which holds what comes
    text = ask(plain_echo, [prompt], ASCII)[0].outputs[0].text
    stop = text[6:13]
    params = replace(ASCII, stop=(stop,), include_stop_str_in_output=shown)
    (off,) = completions(ask(plain_echo, [prompt], params))
    assert off.text == text[: text.index(stop) + (len(stop) if shown else 0)]
    (on,) = completions(
        ask(echo_llm, [prompt], params, speculative=by(method), speculative_trace=True)
    )
    assert on == off
    assert (on.finish_reason, on.stop_reason) == (FinishReason.STOP, stop)
    assert on.speculative_trace.sources[7:13].count(method) >= 5
    assert on.speculative.stats.num_tokens == len(on.token_ids)
    pieces = [
        piece.outputs[0] for piece in stream(echo_llm, prompt, params, speculative=by(method))
    ]
    assert "".join(piece.text for piece in pieces) == off.text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == off.token_ids
    assert pieces[-1].finish_reason == FinishReason.STOP


@pytest.mark.parametrize(("method", "most"), [("ngram", 3), ("same", 8)])
def test_a_draft_longer_than_what_is_left_adds_no_token(
    echo_llm: LLM, plain_echo: LLM, method: str, most: int
) -> None:  # B005
    prompt = "one two three one two three one two"
    (whole,) = ids(ask(plain_echo, [prompt]))
    for max_tokens in range(1, 6):
        params = replace(GREEDY, max_tokens=max_tokens)
        with plans_of(echo_llm) as plans:
            outputs = ask(echo_llm, [prompt], params, speculative=by(method, most))
        (output,) = completions(outputs)
        assert output.token_ids == whole[:max_tokens]
        assert output.finish_reason == FinishReason.LENGTH
        assert len(output.logprobs) == max_tokens
        if max_tokens == 1:  # nobody is even asked
            assert not any(plan.draft_requests for plan in plans)
        elif method == "same" and max_tokens > 2:
            assert num_drafted(outputs) > 0


@pytest.mark.parametrize("method", ["ngram", "same"])
def test_drafts_stop_at_the_end_of_the_context(tmp_path: Path, method: str) -> None:  # B006
    folder = make_echo(tmp_path / "short", max_position_embeddings=64)
    prompts = [(tokens(5, length) * 13)[:length] for length in range(55, 64)]
    args: dict[str, Any] = {"max_model_len": 64}
    with make_llm(folder, enable_prefix_caching=False, **args) as plain:
        expected = [ask(plain, [p], replace(GREEDY, max_tokens=None))[0] for p in prompts]
        (short,) = ask(plain, [[1, 2]])
    for prompt, output in zip(prompts, completions(expected)):
        assert len(output.token_ids) == 64 - len(prompt)
        assert output.finish_reason == FinishReason.LENGTH
    drafts = [ngram(8), draft_model("same", folder, 8)]
    with make_llm(folder, drafts, **args) as llm, plans_of(llm) as plans:
        for max_tokens in (None, 32):
            params = replace(GREEDY, max_tokens=max_tokens)
            outputs = [ask(llm, [p], params, speculative=by(method))[0] for p in prompts]
            assert completions(outputs) == completions(expected)
            assert num_drafted(outputs) > 0
            three = ask(
                llm,
                [prompts[0], prompts[6], [1, 2]],
                [params, params, GREEDY],
                speculative=by(method),
            )
            assert completions(three) == completions([expected[0], expected[6], short])
    for plan in plans:
        for request_id, count in plan.num_scheduled_tokens.items():
            assert plan.num_computed_tokens[request_id] + count < 64  # the 64th is never computed


def test_a_draft_models_shorter_context_ends_drafts_of_that_request_alone(
    target: Path, plain: LLM, tmp_path: Path
) -> None:  # B007
    shorter = make_target(tmp_path / "shorter", max_position_embeddings=128)
    prompts = [tokens(120, 1), tokens(200, 2), tokens(10, 3)]
    params = [replace(GREEDY, max_tokens=count) for count in (64, 20, 64)]
    with make_llm(target, [draft_model("shorter", shorter, 4)]) as llm:
        outputs = ask(llm, prompts, params, speculative_trace=True)
    assert completions(outputs) == completions(ask(plain, prompts, params))
    crossing, beyond, below = (output.speculative_trace.sources for output in completions(outputs))
    assert crossing[1:8].count("shorter") >= 5
    assert "shorter" not in crossing[10:]
    assert "shorter" not in beyond
    assert below.count("shorter") >= 48


@pytest.mark.parametrize(
    "prompt", [[7], [7, 8], [*range(60)], [5] * 50], ids=["one", "two", "distinct", "equal"]
)
def test_a_prompt_without_matches_or_of_nothing_else_is_answered(
    tmp_path_factory: pytest.TempPathFactory, prompt: list[int]
) -> None:  # B008
    folder = make_target(tmp_path_factory.mktemp("endless"), eos_token_id=None)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": None}))
    params = replace(GREEDY, max_tokens=30)
    with make_llm(folder, enable_prefix_caching=False) as plain:
        expected = completions(ask(plain, [prompt], params))
    with make_llm(folder, [ngram(5, low=2)]) as llm, plans_of(llm) as plans:
        for ignores in (True, False):
            outputs = ask(llm, [prompt], replace(params, ignore_eos=ignores))
            assert completions(outputs) == expected
    assert len(expected[0].token_ids) == 30
    first, *later = (plan for plan in plans if plan.new_requests)
    assert not first.draft_token_ids
    for plan in plans:  # without drafts a step is one token of the newest
        for request_id, count in plan.num_scheduled_tokens.items():
            num_drafts = len(plan.draft_token_ids.get(request_id, ()))
            assert count == num_drafts + 1 or plan in (first, *later)


# --- logprobs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["same", "other", "ngram"])
def test_logprobs_of_accepted_tokens_are_the_targets(
    echo: Path, echo_llm: LLM, llm: LLM, target: Path, method: str
) -> None:  # B012
    engine, folder = (echo_llm, echo) if method == "ngram" else (llm, target)
    prompt = tokens(6, 4) * 3
    params = replace(GREEDY, max_tokens=40, logprobs=5)
    outputs = ask(engine, [prompt], params, speculative=by(method))
    (output,) = completions(outputs)
    if method != "other":
        assert num_accepted(outputs) > 10
    reference = NaiveEngine(folder).logits(prompt + output.token_ids).log_softmax(-1)
    assert len(output.logprobs) == 40
    for i, (token_id, entry) in enumerate(zip(output.token_ids, output.logprobs)):
        theirs = reference[len(prompt) - 1 + i]
        assert token_id == next(iter(entry)) == int(theirs.argmax())
        assert {*entry} == {*theirs.topk(5).indices.tolist()}
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(theirs[candidate]), abs=1e-3)
            assert logprob.logprob < 0.0 or theirs[candidate] > -1e-6


def test_prompt_logprobs_come_whole_beside_drafts(target: Path, plain: LLM) -> None:  # B014
    prompts = [tokens(20, 1), tokens(50, 2), tokens(20, 3)]
    asked = replace(GREEDY, prompt_logprobs=2, max_tokens=20)
    params = [GREEDY, asked, GREEDY]
    expected = [ask(plain, [p], one)[0] for p, one in zip(prompts, params)]
    with make_llm(target, [draft_model("same", target, 4)], max_num_batched_tokens=16) as llm:
        for _ in range(2):  # over a warm cache, too
            outputs = ask(llm, prompts, params)
            assert completions(outputs) == completions(expected)
            assert [output.prompt_logprobs for output in outputs] == [
                output.prompt_logprobs for output in expected
            ]
            assert num_accepted(outputs) == num_drafted(outputs) > 30
    first, *entries = outputs[1].prompt_logprobs
    assert first is None
    assert len(entries) == 49
    assert all(token_id in entry for token_id, entry in zip(prompts[1][1:], entries))


# --- distributions and vocabularies ------------------------------------------------------------


def test_text_sampled_behind_drafts_follows_the_target(tmp_path: Path) -> None:  # B019
    prompt, num_samples = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 20_000
    folder = make_checkpoint(
        tmp_path / "v16",
        seed=76,  # so that each of the first four tokens is often the first, and its guess right
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    params = [
        SamplingParams(n=100, temperature=1.0, seed=seed, max_tokens=4)
        for seed in range(0, num_samples, 100)
    ]
    with make_llm(folder, [ngram(3)], max_num_seqs=500) as llm:
        outputs = ask(llm, [prompt] * len(params), params)
        some_off = ids(ask(llm, [prompt] * 20, params[:20], speculative=OFF))
    samples = ids(outputs)
    assert num_drafted(outputs) > 2 * num_accepted(outputs) > 2000
    assert samples[: len(some_off)] == some_off
    counts: dict[tuple[int, ...], torch.Tensor] = {}
    for sample in samples:
        for i, token_id in enumerate(sample):
            counts.setdefault(tuple(sample[:i]), torch.zeros(16))[token_id] += 1
    naive = NaiveEngine(folder)
    often = {prefix for prefix, count in counts.items() if count.sum() >= 1000}
    assert {(), (1,), (2,), (3,), (4,)} <= often  # behind each of the four there is a draft
    for prefix in often:
        law = naive.logits([*prompt, *prefix])[-1].softmax(-1)
        assert _p_value(counts[prefix], law) > 1e-5, prefix


def _p_value(counts: torch.Tensor, law: torch.Tensor) -> float:
    """Pearson's chi-square test; categories expected less than five times are taken as one."""
    expected = law * counts.sum()
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).double()
    statistic = ((counts - expected) ** 2 / expected.clamp_min(1e-9)).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("vocab_size", [200, 264], ids=["smaller", "padded"])
def test_a_draft_model_of_another_vocabulary_size_is_refused(
    target: Path, tmp_path: Path, vocab_size: int
) -> None:  # B024
    small = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    draft = make_other(tmp_path / "draft", vocab_size=vocab_size, **small)
    with pytest.raises(ConfigError, match=rf"{vocab_size} tokens .* one of 260") as caught:
        make_llm(target, [draft_model("draft", draft)])
    assert str(draft) in str(caught.value)


def test_a_draft_model_of_another_tokenizer_is_warned_of_and_changes_nothing(
    target: Path, plain: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # B024
    draft = make_other(tmp_path / "draft")
    file = draft / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<|begin|>"))
    logging.getLogger("nano").propagate = True
    with caplog.at_level(logging.WARNING), make_llm(target, [draft_model("draft", draft)]) as llm:
        outputs = ask(llm, [tokens(9)])
    assert "tokenizer.json is not the target's" in caplog.text
    assert completions(outputs) == completions(ask(plain, [tokens(9)]))
    assert num_drafted(outputs) > 0
