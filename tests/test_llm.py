"""The library as its users call it, and what users of other engines reported (ids like B028)."""

import math
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nano import LLM, SamplingParams
from nano.engine.client import InProcessClient
from nano.errors import ConfigError, EngineDead, InvalidRequest
from nano.generate import main as generate_main
from nano.outputs import FinishReason
from tests.engine.naive import NaiveEngine
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE, make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llm"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, dtype="float64", max_num_batched_tokens=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def naive(checkpoint) -> NaiveEngine:
    return NaiveEngine(checkpoint)


def small(checkpoint: Path, **engine_args) -> LLM:
    defaults = {"dtype": "float64", "max_num_batched_tokens": 512, "max_model_len": 256}
    return LLM(checkpoint, **(defaults | engine_args))


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


def generate(llm: LLM, prompt, params: SamplingParams = GREEDY):
    return llm.generate(prompt, params, use_tqdm=False)[0]


def ids(output) -> list[int]:
    return output.outputs[0].token_ids


# --- prompts in, outputs out -------------------------------------------------------------------


def test_text_token_ids_and_mappings_are_the_same_prompt(llm):
    text = "hello"
    forms = [text, list(text.encode()), {"prompt": text}, {"prompt_token_ids": [*text.encode()]}]
    outputs = [generate(llm, form) for form in forms]
    assert len({tuple(ids(output)) for output in outputs}) == 1
    assert outputs[0].prompt == text
    assert outputs[1].prompt is None
    assert outputs[0].prompt_token_ids == list(text.encode())
    assert outputs[0].outputs[0].finish_reason == "length"
    assert len(llm.generate([text, text], GREEDY, use_tqdm=False)) == 2


def test_outputs_come_in_input_order_one_per_prompt(llm):  # B052
    lengths = [50, 1, 20, 1, 5]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [tokens(9, seed) for seed in range(5)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(ids(output)) for output in outputs] == lengths
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert llm.generate([], GREEDY) == []
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 3 prompts"):
        llm.generate(prompts[:3], params[:2])
    same = prompts[0]
    first, second = llm.generate([same, same], GREEDY, use_tqdm=False)
    assert ids(first) == ids(second)


def test_text_parts_are_text_and_other_content_is_refused(llm):
    plain = llm.chat([{"role": "user", "content": "a\nb"}], GREEDY, use_tqdm=False)[0]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    output = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)[0]
    assert output.prompt == plain.prompt
    empty = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    assert "None" not in llm.chat(empty, GREEDY, use_tqdm=False)[0].prompt
    for content in (None, 5, [{"type": "image_url"}], ["a"]):
        with pytest.raises(InvalidRequest, match="content"):
            llm.chat([{"role": "user", "content": content}], GREEDY)
    with pytest.raises(InvalidRequest, match="at least one message"):
        llm.chat([[]], GREEDY)


def test_the_quick_look_tells_of_a_request_that_fails(checkpoint, tmp_path, monkeypatch, capsys):
    broken = shutil.copytree(checkpoint, tmp_path / "nan")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][:] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("sys.argv", ["nano.generate", "--model", str(broken), "Hello"])
    assert generate_main() == 1
    assert "error: " in capsys.readouterr().err


def test_a_chat_is_rendered_by_the_models_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    output = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert output.prompt == text
    assert ids(output) == ids(generate(llm, text))
    both = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [ids(o) for o in both] == [ids(output)] * 2
    streamed = [o.outputs[0].text for o in llm.chat(messages, GREEDY, stream=True)]
    assert len(streamed) > 1
    assert "".join(streamed) == output.outputs[0].text


def test_leaving_a_stream_early_frees_what_it_held(llm):
    stream = llm.generate(tokens(40), SamplingParams(max_tokens=100, ignore_eos=True), stream=True)
    next(stream)
    assert llm.stats()["num_running"] == 1
    stream.close()
    assert llm.stats()["num_running"] == 0
    assert llm.stats()["kv_cache_usage"] == 0
    assert len(ids(generate(llm, "next"))) == 8


def test_after_ctrl_c_in_the_middle_of_a_step_the_engine_goes_on(checkpoint, monkeypatch):
    with small(checkpoint) as llm:
        expected = ids(generate(llm, "next"))
        stream = llm.generate("other", GREEDY, stream=True)
        streamed = [*ids(next(stream))]
        runner = llm._client._core._executor._worker.runner
        forward = runner.forward

        def interrupted(plan):
            monkeypatch.setattr(runner, "forward", forward)
            os.kill(os.getpid(), signal.SIGINT)
            forward(plan)

        monkeypatch.setattr(runner, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "def"], GREEDY, use_tqdm=False)
        assert llm.stats()["num_running"] == 1  # the stream, which misses nothing
        streamed += [token_id for output in stream for token_id in ids(output)]
        assert streamed == ids(generate(llm, "other"))
        assert ids(generate(llm, "next")) == expected
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_dead_engine_is_reported_once_and_by_its_cause(checkpoint, monkeypatch):
    with small(checkpoint) as llm:
        worker = llm._client._core._executor._worker
        monkeypatch.setattr(worker.runner, "forward", lambda plan: 1 // 0)
        with pytest.raises(EngineDead, match="core died: ZeroDivisionError"):
            llm.generate(["abc", "def"], GREEDY, use_tqdm=False)
        assert not llm._mailboxes
        assert llm._outputs.num_unfinished_requests == 0


def test_seeds_are_recorded_and_reproduce_an_unseeded_output(checkpoint):
    params = SamplingParams(temperature=1.0, max_tokens=10)
    runs = []
    for _ in range(2):  # two engines of the same seed draw the same seeds
        with small(checkpoint, seed=5) as llm:
            runs.append([generate(llm, "abc", params).outputs[0] for _ in range(2)])
    assert [c.token_ids for c in runs[0]] == [c.token_ids for c in runs[1]]
    assert runs[0][0].seed != runs[0][1].seed
    with small(checkpoint, seed=6) as llm:
        again = SamplingParams(temperature=1.0, max_tokens=10, seed=runs[0][1].seed)
        assert ids(generate(llm, "abc", again)) == runs[0][1].token_ids
        assert generate(llm, "abc", params).outputs[0].seed != runs[0][0].seed


def test_times_of_a_request_are_in_order(llm):
    metrics = generate(llm, tokens(30)).metrics
    assert 0 <= metrics.queue_time <= metrics.time_to_first_token
    assert metrics.first_token_time < metrics.finished_time


def test_in_process_messages_survive_the_wire(checkpoint):
    from nano.engine.codec import decode, encode

    params = SamplingParams(temperature=0.8, seed=3, max_tokens=9, logprobs=2, prompt_logprobs=1)
    with small(checkpoint) as llm:
        plain = generate(llm, tokens(20), params)
        client = llm._client
        assert isinstance(client, InProcessClient)
        client._wire = lambda message: decode(encode(message))
        coded = generate(llm, tokens(20), params)
    assert coded.outputs == plain.outputs
    assert coded.prompt_logprobs == plain.prompt_logprobs


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "at least one token"),  # B047
        ([[]], "at least one token"),
        (["ok", ""], "at least one token"),
        ([1, VOCAB_SIZE], f"token id {VOCAB_SIZE}, outside"),
        ([1, -1], "token id -1, outside"),
        (list(range(200)) * 3, "600 tokens long; at most 511 fit"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "a prompt mapping holds"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a non-empty string"),
        ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a non-empty string"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused_and_the_next_one_answered(llm, prompt, message):
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert llm.stats()["num_waiting"] == llm.stats()["num_running"] == 0
    assert len(ids(generate(llm, "next"))) == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [  # B061, B058, B065
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-40),  # would make infinite logits
        ("repetition_penalty", -1),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", -1),
        ("n", 10**6),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 2**63),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("frequency_penalty", 5),
        ("presence_penalty", -3),
        ("stop", ["x"] * 10**4),
        ("stop", [""]),
        ("stop", 3),
        ("seed", 2**70),
        ("seed", -1),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {5: 1000}),
        ("logit_bias", {5: None}),
        ("logit_bias", {-1: 5}),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
    ],
    ids=lambda v: str(v)[:20],
)
def test_a_bad_parameter_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {191222: -100}}, "logit_bias holds token id 191222"),
        ({"logit_bias": {VOCAB_SIZE: 5}}, "logit_bias holds token id"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids holds token id"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids holds token id"),
        ({"logprobs": 21}, r"max_logprobs \(20\), got 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs -1"),
        ({"min_tokens": 511, "max_tokens": 600}, "min_tokens is 511"),
    ],
    ids=str,
)
def test_a_parameter_beyond_the_model_is_refused_and_the_next_request_answered(
    llm, params, message
):
    with pytest.raises(InvalidRequest, match=message):
        generate(llm, "abc", SamplingParams(**params))
    biased = {i: float(i % 7 - 3) for i in range(200)}
    assert len(ids(generate(llm, "next", SamplingParams(logit_bias=biased, max_tokens=2)))) == 2


def test_what_is_no_prompt_and_no_parameters_is_refused_by_its_type(llm):
    for prompts in (None, (text for text in ["a"]), np.array([1, 2])):
        with pytest.raises(InvalidRequest, match="prompts must be a text"):
            llm.generate(prompts)
    with pytest.raises(InvalidRequest, match="prompt_token_ids must be a list of token ids"):
        llm.generate({"prompt_token_ids": "abc"})
    with pytest.raises(InvalidRequest, match="sampling_params must be a SamplingParams, got dict"):
        llm.generate("abc", {"temperature": 0})


def test_unknown_engine_arguments_are_refused(checkpoint):
    with pytest.raises(ConfigError, match="unknown engine argument 'max_seqs'"):
        LLM(checkpoint, max_seqs=3)


# --- finish reasons and limits -----------------------------------------------------------------


def test_finish_reasons_at_the_limits(checkpoint):  # B080
    force_eos = {"logit_bias": {EOS_TOKEN_ID: 100.0}}
    cases = [
        ({"max_tokens": 1}, "length", 1, None),
        ({"max_tokens": 5}, "length", 5, None),
        ({"max_tokens": 1, **force_eos}, "stop", 1, None),
        ({"max_tokens": 4, "ignore_eos": True, **force_eos}, "length", 4, None),
        ({"max_tokens": 9, "stop_token_ids": [7], "logit_bias": {7: 100.0}}, "stop", 1, 7),
        ({"max_tokens": 9, "min_tokens": 3, **force_eos}, "stop", 4, None),
        ({"max_tokens": 900}, "length", 256 - 3, None),  # the end of the context
        ({"max_tokens": None}, "length", 256 - 3, None),
    ]
    with small(checkpoint) as llm:
        for params, reason, num_tokens, stop_reason in cases:
            if "logit_bias" not in params:
                params = {**params, "ignore_eos": True}
            output = generate(llm, "abc", SamplingParams(temperature=0.0, **params)).outputs[0]
            got = (output.finish_reason, len(output.token_ids), output.stop_reason)
            assert got == (reason, num_tokens, stop_reason), params


def test_eos_ids_of_generation_config_end_a_request(tmp_path):  # B119
    folder = make_checkpoint(tmp_path / "m")
    with small(folder) as llm:
        free = ids(generate(llm, "abc"))
    stop = free[2]
    assert stop not in free[:2]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [0, {stop}]}}')
    with small(folder) as llm:
        output = generate(llm, "abc", SamplingParams(temperature=0.0, max_tokens=8)).outputs[0]
    assert output.token_ids == free[:3]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_a_stop_string_cuts_text_ids_and_logprobs_at_the_token_that_completes_it(llm):
    free = generate(
        llm,
        "abc",
        SamplingParams(
            temperature=0.0, max_tokens=12, ignore_eos=True, allowed_token_ids=list(range(97, 123))
        ),
    ).outputs[0]
    stop = free.text[4:6]
    where = free.text.index(stop)
    for include in (False, True):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=12,
            ignore_eos=True,
            allowed_token_ids=list(range(97, 123)),
            stop=[stop],
            include_stop_str_in_output=include,
            logprobs=0,
        )
        output = generate(llm, "abc", params).outputs[0]
        assert output.text == free.text[: where + (2 if include else 0)]
        assert output.token_ids == free.token_ids[: where + 2]
        assert len(output.logprobs) == len(output.token_ids)
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)


# --- prefix cache ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])  # B028
def test_a_prompt_that_is_cached_whole_still_computes_a_token(checkpoint, length):
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, ignore_eos=True)
    with small(checkpoint) as llm:
        outputs = [generate(llm, tokens(length), params) for _ in range(3)]
        outputs += llm.generate([tokens(length)] * 3, params, use_tqdm=False)
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[0] == 0
    assert cached[1:] == [(length - 1) // 16 * 16] * 5
    for output in outputs:
        assert ids(output) == ids(outputs[0])
        for ours, first in zip(output.outputs[0].logprobs, outputs[0].outputs[0].logprobs):
            assert list(ours) == list(first)
            for token_id, logprob in first.items():
                assert ours[token_id].logprob == pytest.approx(logprob.logprob, abs=1e-9)


def test_evicted_blocks_are_never_read_by_their_old_hash(checkpoint):  # B029
    prompts = [tokens(96, seed) for seed in range(6)]
    with small(checkpoint, enable_prefix_caching=False) as llm:
        expected = [ids(generate(llm, prompt)) for prompt in prompts]
    rng = random.Random(0)
    with small(checkpoint, num_gpu_blocks_override=12) as llm:
        for _ in range(3):
            for i in rng.sample(range(6), 6):
                output = generate(llm, prompts[i])
                assert ids(output) == expected[i]
                assert output.num_cached_tokens in range(0, 96, 16)


def test_tenants_with_different_salts_share_no_cache(checkpoint):  # B031
    prompt = tokens(64)
    with small(checkpoint) as llm:
        outputs = [
            generate(llm, {"prompt_token_ids": prompt} | ({"cache_salt": s} if s else {}))
            for s in ("a", "b", "a", None)
        ]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 48, 0]
    assert len({tuple(ids(output)) for output in outputs}) == 1


@pytest.mark.parametrize("length", [32, 40])
@pytest.mark.parametrize("budget", [16, 33, 100])
def test_prompt_logprobs_are_whole_whatever_is_cached_or_chunked(  # B032, B041
    checkpoint, naive, length, budget
):
    prompt = tokens(length)
    wanted = naive.logits(prompt).log_softmax(-1)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    with small(checkpoint, max_num_batched_tokens=budget) as llm:
        others = [tokens(30, seed) for seed in (1, 2, 3)]
        batch = [prompt, *others]
        mixed = llm.generate(batch, [params, GREEDY, GREEDY, GREEDY], use_tqdm=False)[0]
        generate(llm, prompt)  # leaves the prompt in the cache
        outputs = [mixed, generate(llm, prompt, params)]
    for output in outputs:
        assert len(output.prompt_logprobs) == length
        assert output.prompt_logprobs[0] is None
        for i in range(1, length):
            entry = output.prompt_logprobs[i]
            assert entry[prompt[i]].logprob == pytest.approx(
                float(wanted[i - 1, prompt[i]]), abs=1e-4
            )


def test_hundreds_of_requests_leave_no_block_behind(checkpoint):  # B034
    rng = random.Random(1)
    repeated = [tokens(rng.choice([15, 16, 17, 31, 32, 33]), seed) for seed in range(8)]
    with small(checkpoint, num_gpu_blocks_override=16) as llm:
        prompts, params = [], []
        for i in range(300):
            new = tokens(rng.choice([15, 16, 17, 31, 32, 33]), 1000 + i)
            prompts.append(rng.choice([new, rng.choice(repeated)]))
            params.append(
                SamplingParams(n=rng.choice([1, 1, 2]), max_tokens=rng.choice([1, 3]), seed=i)
            )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(output.finished for output in outputs)
        assert llm.stats()["kv_cache_usage"] == 0
        whole = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
        assert len(ids(generate(llm, tokens(240), whole))) == 16  # all 16 blocks


@pytest.mark.parametrize("block_size", [16, 256])
def test_a_prompt_that_shares_a_prefix_in_the_same_batch_equals_its_solo_run(  # B038
    checkpoint, block_size
):
    prompt = tokens(300)
    forked = prompt[:160] + tokens(30, 9)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    shape = {"block_size": block_size, "max_model_len": 512}
    with small(checkpoint, enable_prefix_caching=False, **shape) as llm:
        alone = [ids(generate(llm, p, params)) for p in (prompt, forked)]
    with small(checkpoint, **shape) as llm:
        both = llm.generate([prompt, prompt, forked], params, use_tqdm=False)
        assert [ids(output) for output in both] == [alone[0], alone[0], alone[1]]
    with small(checkpoint, **shape) as llm:
        stream = llm.generate(prompt, params, stream=True)
        first = ids(next(stream))
        late = llm.generate(forked, params, stream=True)
        second = [token for output in late for token in ids(output)]
        first += [token for output in stream for token in ids(output)]
        assert (first, second) == (alone[0], alone[1])


def test_every_length_around_block_borders_equals_hugging_face_and_caches_its_turn(  # B039
    checkpoint,
):
    reference = AutoModelForCausalLM.from_pretrained(checkpoint).double().eval()
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with small(checkpoint) as llm:
        for length in range(1, 35):
            prompt = tokens(length, length)
            theirs = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, length, dtype=torch.long),
                max_new_tokens=20,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0, length:].tolist()
            outputs = [generate(llm, prompt, params) for _ in range(2)]
            assert [ids(output) for output in outputs] == [theirs, theirs]
            known = length + 20 - 1  # the last token was never computed
            turn = generate(llm, prompt + theirs + tokens(5, 99), params)
            assert turn.num_cached_tokens == known // 16 * 16


# --- scheduling --------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_and_what_outgrows_the_cache_ends(checkpoint):  # B043
    with small(checkpoint, num_gpu_blocks_override=8, max_model_len=512) as llm:
        with pytest.raises(InvalidRequest, match=r"128 tokens long; at most 127"):
            generate(llm, tokens(128))
        grown, short = llm.generate(
            [tokens(100), tokens(5)],
            [SamplingParams(max_tokens=200, ignore_eos=True), GREEDY],
            use_tqdm=False,
        )
        assert grown.outputs[0].finish_reason == FinishReason.LENGTH
        assert len(ids(grown)) == 28
        assert len(ids(short)) == 8


def test_a_running_stream_gets_a_token_in_every_step_while_long_prompts_come(  # B049
    checkpoint,
):
    with small(checkpoint, max_num_batched_tokens=32, max_model_len=512) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        stream = llm.generate("abc", params, stream=True)
        next(stream)
        others = llm.generate([tokens(300, s) for s in range(3)], GREEDY, stream=True)
        before = llm.stats()["num_steps"]
        finished = 0
        while finished < 3:  # stepping the engine for the long prompts steps the stream, too
            finished += next(others).finished
        num_steps = llm.stats()["num_steps"] - before
        assert num_steps >= 900 // 32
        received = len(llm._mailboxes["request-0"])
        assert received == num_steps
        assert sum(len(ids(output)) for output in stream) == 59


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_one_embedding_fails_the_requests_that_use_it_and_no_other(  # B069
    tmp_path, temperature
):
    folder = make_checkpoint(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][65] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=6, ignore_eos=True, logit_bias={65: -100.0}
    )
    good, bad = [list(b"hello"), tokens(40, 3)], list(b"hellA")
    good[1] = [t for t in good[1] if t != 65]
    with small(folder) as llm:
        alone = [ids(generate(llm, prompt, params)) for prompt in good]
        outputs = llm.generate([good[0], bad, good[1], bad + tokens(50, 4)], params, use_tqdm=False)
        assert [ids(outputs[0]), ids(outputs[2])] == alone
        for output in (outputs[1], outputs[3]):
            assert output.outputs[0].finish_reason == FinishReason.ERROR
            assert "not numbers" in output.outputs[0].error
        # What the failed requests computed is not found by the next one.
        assert generate(llm, bad + tokens(50, 4), params).num_cached_tokens == 0
        assert llm.stats()["kv_cache_usage"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_failing_request_spoils_no_block_that_others_read_in_the_same_step(tmp_path, value):
    folder = make_checkpoint(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][65] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    params = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={65: -100.0})
    shared = [token_id for token_id in tokens(80) if token_id != 65][:64]
    with small(folder) as llm:
        alone = ids(generate(llm, [*shared, 9], params))
        llm.reset_prefix_cache()
        bad, good = llm.generate([[*shared, 65], [*shared, 9]], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == FinishReason.ERROR
    assert good.num_cached_tokens == 64
    assert ids(good) == alone


def test_nan_in_every_row_is_an_error_not_token_zero(tmp_path):  # B069
    folder = make_checkpoint(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with small(folder) as llm:
        output = generate(llm, "abc").outputs[0]
    assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, [])


def test_penalties_equal_hugging_face_and_the_formula(checkpoint, naive):  # B060
    prompt = list(b"Paris Paris Paris Paris")
    reference = AutoModelForCausalLM.from_pretrained(checkpoint).double().eval()
    theirs = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=24,
        do_sample=False,
        repetition_penalty=1.3,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    with small(checkpoint) as llm:
        base = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
        assert ids(generate(llm, prompt, SamplingParams(repetition_penalty=1.3, **base))) == theirs
        penalised = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0, **base)
        ours = ids(generate(llm, prompt, penalised))
    expected: list[int] = []
    for _ in range(24):
        logits = naive.logits(prompt + expected)[-1].clone()
        for token in set(expected):
            logits[token] -= 2.0 * expected.count(token) + 2.0
        expected.append(int(logits.argmax()))
    assert ours == expected


@pytest.mark.parametrize("messages", [None, "hi", {"role": "user", "content": "x"}, ["hi"], [None]])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(InvalidRequest, match="must be a list of messages"):
        llm.chat(messages)
