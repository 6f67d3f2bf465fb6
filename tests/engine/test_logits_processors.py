"""Custom logits processors through whole engines: the same tokens whoever guesses, and as a plain
loop gives them; a mistake ends one request; arguments are applied or refused, never dropped.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastapi.testclient import TestClient

from nano import LLM, EngineConfig, LogitsProcessor, SamplingParams
from nano.checkpoint.hf_config import load_decoder_config
from nano.engine.input_processor import InputProcessor
from nano.engine.tokenizer import Tokenizer
from nano.errors import ConfigError, InvalidRequest
from nano.layers.native_kernels import NativeKernels
from nano.outputs import FinishReason, RequestOutput
from nano.sampling.sampler import Sampler
from nano.serve.app import create_app
from nano.serve.async_engine import AsyncEngine
from nano.serve.options import ServerOptions
from tests.engine.naive import NaiveEngine
from tests.engine.test_invisibility import assert_same, assert_same_completion
from tests.sampling.rows import make_rows
from tests.serve.drafting import DraftingClient
from tests.tiny import make_checkpoint

needs_exact_kernels = pytest.mark.skipif(
    not NativeKernels.is_available(), reason="bits are promised on our own kernels"
)


class NoRepeat(LogitsProcessor):
    """Bans the token before, for requests with `no_repeat`."""

    def new_req_logits_processor(self, params):
        return self.ban if (params.extra_args or {}).get("no_repeat") else None

    @staticmethod
    def ban(prompt_ids, output_ids, logits):
        logits[(prompt_ids + output_ids)[-1]] = -torch.inf
        return logits


class Punctual(LogitsProcessor):
    """`punctual=[token, n, m]`: it comes as outputs n and m, and nowhere else."""

    @classmethod
    def validate_params(cls, params):
        given = (params.extra_args or {}).get("punctual", [0, 0, 0])
        if len(given) != 3:
            raise ValueError(f"punctual must be [token, n, m], got {given}")

    def new_req_logits_processor(self, params):
        if "punctual" not in (params.extra_args or {}):
            return None
        token_id, *places = params.extra_args["punctual"]

        def hold(output_ids, logits):
            if len(output_ids) not in places:
                logits[token_id] = -torch.inf
                return logits
            only = torch.full_like(logits, -torch.inf)
            only[token_id] = logits[token_id]
            return only

        return hold


class Faulty(LogitsProcessor):
    """Raises at output `fault`."""

    def new_req_logits_processor(self, params):
        fault = (params.extra_args or {}).get("fault")

        def fail(output_ids, logits):
            if len(output_ids) == fault:
                raise RuntimeError(f"no idea at {fault}")
            return logits

        return None if fault is None else fail


KINDS = [NoRepeat, Punctual, Faulty]
EXTRA_ARGS = [
    None,
    {"no_repeat": True},
    {"punctual": [65, 3, 11]},
    {"no_repeat": 1, "punctual": [66, 0, 5]},
]


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(2)
    shared = [rng.randrange(256) for _ in range(24)]
    return [
        (
            shared[: 8 * (i % 4)] + [rng.randrange(256) for _ in range(1 + 2 * i)],
            SamplingParams(
                temperature=0.8 * (i // 4 % 2),
                presence_penalty=0.5 * (i % 3),
                seed=i,
                max_tokens=24,
                ignore_eos=True,
                logprobs=2,
                extra_args=EXTRA_ARGS[i % 4],
            ),
        )
        for i in range(16)
    ]


REQUESTS = make_requests()


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("processed"), "llama")


def make_llm(target: Path, proposer: str = "off", **engine_args) -> LLM:
    options = {
        "off": None,
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4},
        "same": {"method": "draft_model", "model": str(target), "num_speculative_tokens": 4},
    }[proposer]
    config = options and {"proposers": [options], "draft_length": "static"}
    defaults = {"max_model_len": 128, "max_num_batched_tokens": 8192, "logits_processors": KINDS}
    return LLM(target, speculative_config=config, **(defaults | engine_args))


def run(llm: LLM, requests=REQUESTS) -> list[RequestOutput]:
    prompts = [prompt for prompt, _ in requests]
    return llm.generate(prompts, [params for _, params in requests], use_tqdm=False)


@pytest.fixture(scope="module")
def golden(target) -> list[RequestOutput]:
    """Each request alone, without speculation and without a prefix cache."""
    with make_llm(target, enable_prefix_caching=False) as llm:
        return [run(llm, [request])[0] for request in REQUESTS]


def loop(naive: NaiveEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    """Token by token over the whole prefix, the edits written out."""
    output: list[int] = []
    extra = params.extra_args or {}
    while len(output) < params.max_tokens:
        logits = naive.logits(prompt + output)[-1].clone()
        if "no_repeat" in extra:
            logits[(prompt + output)[-1]] = -torch.inf
        if "punctual" in extra:
            token_id, n, m = extra["punctual"]
            is_other = torch.arange(len(logits)) != token_id
            is_banned = is_other if len(output) in (n, m) else ~is_other
            logits = logits.masked_fill(is_banned, -torch.inf)
        rows, states = make_rows([(params, prompt, output)])
        output += Sampler().sample_rows(logits[None], rows, states).token_ids
    return output


def test_the_engine_equals_a_plain_loop_that_edits_every_row(target, golden):
    naive = NaiveEngine(target)
    for (prompt, params), output in zip(REQUESTS, golden):
        assert output.outputs[0].token_ids == loop(naive, prompt, params)


def test_the_processors_bite(target, golden):
    requests = [(prompt, replace(params, extra_args=None)) for prompt, params in REQUESTS]
    with make_llm(target, logits_processors=None) as llm:
        free = run(llm, requests)
    for i, (output, wanted) in enumerate(zip(free, golden)):
        is_same = output.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert is_same or EXTRA_ARGS[i % 4] is not None
        assert not is_same or "punctual" not in (EXTRA_ARGS[i % 4] or {})


PROPOSERS = ("off", "ngram", "same")  # the last is the target as its own draft model
SHAPES = {
    "all at once": {},
    "chunks": {"max_num_batched_tokens": 24, "block_size": 8},
    "preempting": {"num_gpu_blocks_override": 20, "block_size": 8},
}


@needs_exact_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROPOSERS)
def test_speculation_chunks_cache_and_preemption_are_invisible(target, golden, name, shape):
    with make_llm(target, name, **SHAPES[shape]) as llm:
        for _ in range(2):  # the second time over a warm cache
            assert_same(run(llm), golden, "float32")
        stats = llm.stats()
    assert stats["num_prefix_hit_tokens"] > 0
    assert (stats["num_preemptions"] > 0) == (shape == "preempting")
    if name != "off":
        assert stats["spec_decode_num_accepted_tokens"] > 0
    if name == "same":  # a model that guesses for itself is always right, if both see one text
        drafted = stats["spec_decode_num_draft_tokens"]
        assert stats["spec_decode_num_accepted_tokens"] == drafted > 500


@needs_exact_kernels
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_mistake_ends_one_request_with_its_reason_and_what_came_before(target, golden, name):
    requests = list(REQUESTS)
    faults = {0: 0, 4: 7, 8: 12}  # requests without other edits, by the output they fail at
    for i, fault in faults.items():
        prompt, params = requests[i]
        requests[i] = prompt, replace(params, extra_args={"fault": fault})
    with make_llm(target, name) as llm:
        outputs = run(llm, requests)
        after = run(llm)
    assert_same(after, golden, "float32")
    for i, (output, wanted) in enumerate(zip(outputs, golden)):
        ours, theirs = output.outputs[0], wanted.outputs[0]
        if i not in faults:
            assert_same_completion(ours, theirs, 0.0, f"request {i}")
            continue
        assert ours.finish_reason is FinishReason.ERROR
        assert (
            ours.error == f"logits processor Faulty raised RuntimeError('no idea at {faults[i]}')"
        )
        assert ours.token_ids == theirs.token_ids[: faults[i]]


def test_arguments_without_a_processor_are_refused_by_name(target):
    with make_llm(target, logits_processors=[]) as llm:
        with pytest.raises(InvalidRequest, match="extra_args holds 'no_repeat', but") as refusal:
            llm.generate("a", SamplingParams(extra_args={"no_repeat": True}), use_tqdm=False)
        assert refusal.value.param == "extra_args"
        llm.generate("a", SamplingParams(extra_args={}, max_tokens=1), use_tqdm=False)


def test_a_processor_may_refuse_arguments_before_anything_is_queued(target):
    with make_llm(target) as llm, pytest.raises(InvalidRequest, match=r"got \[1\]"):
        llm.generate("a", SamplingParams(extra_args={"punctual": [1]}), use_tqdm=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1], "must map names to values"),
        ({1: 2}, "must have strings as keys, got 1"),
        ({"a": {3: 4}}, "must have strings as keys, got 3"),
        ({"a": [object]}, "must hold what JSON can say"),
        ({"a": 2**63}, "must be in"),
        ({"a": "\ud800"}, "lone surrogate"),
    ],
)
def test_arguments_are_what_a_message_can_carry(given, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(extra_args=given)


def test_arguments_are_a_copy_of_what_was_given():
    given = {"a": [1, {"b": (2, None)}]}
    params = SamplingParams(extra_args=given)
    given["a"].append(3)
    assert params.extra_args == {"a": [1, {"b": [2, None]}]}


def test_paths_that_do_not_work_stop_the_engine_from_starting(target):
    with pytest.raises(ConfigError, match=r"'no\.such:Processor'"):
        make_llm(target, logits_processors=["no.such:Processor"])


@pytest.mark.slow
@needs_exact_kernels
def test_another_process_finds_the_classes_and_gets_the_arguments(target, golden):
    with make_llm(target, use_subprocess=True) as llm:
        assert_same(run(llm, REQUESTS[:8]), golden[:8], "float32")


@pytest.mark.slow
def test_a_path_that_another_process_cannot_find_is_its_answer(target):
    with pytest.raises(ConfigError, match=r"'no\.such:Processor'"):
        make_llm(target, logits_processors=["no.such:Processor"], use_subprocess=True)


class Http:
    """The server's routes over a scripted core, which remembers what reached it."""

    def __init__(self, target: Path, kinds: list[type]):
        self.core = DraftingClient()
        config = EngineConfig.from_args({"max_model_len": 128, "logits_processors": kinds})
        inputs = InputProcessor(
            config,
            load_decoder_config(target),
            Tokenizer.from_folder(target),
            num_kv_slots=self.core.ready.num_kv_slots,
        )
        self.app = create_app(
            AsyncEngine(self.core, inputs), ServerOptions(served_model_name=("tiny",))
        )

    def post(self, **fields):
        with TestClient(self.app) as http:
            return http.post(
                "/v1/completions", json={"prompt": "p", "seed": 0, "max_tokens": 2, **fields}
            )


def test_arguments_over_http_reach_the_processors(target):
    http = Http(target, KINDS)
    given = {"punctual": [65, 1, 2], "a": "b", "c": 0.5}
    assert http.post(vllm_xargs=given).status_code == 200
    assert http.core.requests[-1].sampling_params.extra_args == given


@pytest.mark.parametrize(
    ("kinds", "given", "message"),
    [
        ([], {"punctual": [65, 1, 2]}, "vllm_xargs holds 'punctual', but this engine has no"),
        (KINDS, {"punctual": [65]}, "punctual must be [token, n, m], got [65]"),
        (KINDS, {"deep": {"a": 1}}, "vllm_xargs"),
        (KINDS, {"large": 10**30}, "vllm_xargs must be in"),
    ],
)
def test_arguments_over_http_are_refused_under_their_own_name(target, kinds, given, message):
    reply = Http(target, kinds).post(vllm_xargs=given)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"].startswith("vllm_xargs")
