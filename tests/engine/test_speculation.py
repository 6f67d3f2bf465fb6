"""Speculation is invisible: the same tokens and logprobs as without, bit by bit, whoever guesses.

The requests are those of test_invisibility. `junk` guesses at random: what it may not do shows best
there. A draft model that is the target itself must be right always; a draft of other weights is
nearly always wrong, so its rejected KV would show.
"""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from nano import LLM, SamplingParams
from nano.layers.native_kernels import NativeKernels
from nano.outputs import RequestOutput
from tests.engine.test_invisibility import MAX_MODEL_LEN, NUM_REQUESTS, REQUESTS, assert_same

pytestmark = pytest.mark.skipif(
    not NativeKernels.is_available(), reason="bits are promised on our own kernels"
)


class Junk:
    """Guesses anything, and now and then nothing."""

    def __init__(self, options) -> None:
        self.random = random.Random(0)

    def propose(self, request_id: str, token_ids: np.ndarray, num_tokens: int) -> list[int]:
        return [self.random.randrange(260) for _ in range(self.random.randint(0, num_tokens))]


PROPOSERS = ("ngram", "suffix", "junk", "other", "same", "self_quant")


def proposer(name: str, target: Path, other: Path, num_tokens: int) -> dict:
    options = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1},
        "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0},
        "junk": {"method": "custom_class", "model": f"{__name__}:Junk"},
        "other": {"method": "draft_model", "model": str(other)},
        "same": {"method": "draft_model", "model": str(target)},
        "self_quant": {"method": "self_quant", "quantization": "int8"},
    }[name]
    return {**options, "name": name, "num_speculative_tokens": num_tokens}


def make_llm(target: Path, proposers: list[dict], length: str = "static", **engine_args) -> LLM:
    defaults = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 8192}
    config = {"proposers": proposers, "draft_length": length} if proposers else None
    return LLM(target, speculative_config=config, **(defaults | engine_args))


def run(llm: LLM, requests=REQUESTS, **more) -> list[RequestOutput]:
    prompts = [prompt for prompt, _ in requests]
    return llm.generate(prompts, [params for _, params in requests], use_tqdm=False, **more)


@pytest.fixture(scope="module")
def golden(target) -> list[RequestOutput]:
    """Each request alone, without speculation and without a prefix cache."""
    with make_llm(target, [], enable_prefix_caching=False) as llm:
        return [run(llm, [request])[0] for request in REQUESTS]


def num_accepted(llm: LLM) -> float:
    return llm.stats().get("spec_decode_num_accepted_tokens", 0)


def num_drafted(llm: LLM) -> float:
    return llm.stats().get("spec_decode_num_draft_tokens", 0)


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("num_tokens", [1, 4, 8])
def test_every_proposer_at_every_length_is_invisible(target, other, golden, name, num_tokens):
    with make_llm(target, [proposer(name, target, other, num_tokens)]) as llm:
        for _ in range(2):  # the second time over a warm cache, and past outputs
            assert_same(run(llm), golden, "float32")
        assert num_drafted(llm) > 50
        if name != "junk":
            assert num_accepted(llm) > 0


SHAPES = list(itertools.product((8, 64), (1, 16), (True, False), (True, False)))


@pytest.mark.parametrize("name", ["junk", "other", "same", "self_quant"])
@pytest.mark.parametrize(("budget", "block_size", "prefix_cache", "preempts"), SHAPES)
def test_it_composes_with_chunks_blocks_cache_and_preemption(
    target, other, golden, name, budget, block_size, prefix_cache, preempts
):
    order = random.Random(budget + block_size).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    shape = {"num_gpu_blocks_override": 112 // block_size} if preempts else {}
    with make_llm(
        target,
        [proposer(name, target, other, 4)],
        max_num_batched_tokens=budget,
        block_size=block_size,
        enable_prefix_caching=prefix_cache,
        **shape,
    ) as llm:
        for _ in range(2):
            outputs = run(llm, [REQUESTS[i] for i in order])
            assert_same(outputs, [golden[i] for i in order], "float32")
        stats = llm.stats()
    assert (stats["num_prefix_hit_tokens"] > 0) == prefix_cache
    if not preempts:
        assert stats["num_preemptions"] == 0
    elif block_size == 1 and name in ("junk", "other"):  # who is often right needs fewer at once
        assert stats["num_preemptions"] > 0
    assert stats["kv_cache_usage"] == 0
    if name == "same":
        assert stats["spec_decode_num_accepted_tokens"] == stats["spec_decode_num_draft_tokens"] > 0


def test_several_proposers_and_lengths_chosen_as_it_goes_are_invisible(target, other, golden):
    proposers = [proposer(name, target, other, 4) for name in PROPOSERS]
    with make_llm(target, proposers, length="auto") as llm:
        for _ in range(3):
            assert_same(run(llm), golden, "float32")
        assert num_drafted(llm) > 0


def test_the_target_as_its_own_draft_is_right_always(target, other):
    """Temperature, top-p, penalties, chunks, prefix hits: any hole in its KV would show."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {
            "temperature": 0.8,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "logit_bias": {9: 2},
        },
        {"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 10},
    ]
    rng = random.Random(3)
    shared = [rng.randrange(256) for _ in range(40)]
    requests = [
        (
            shared[: 10 * (i % 5)] + [rng.randrange(256) for _ in range(1 + i)],
            SamplingParams(seed=i, max_tokens=30, **kinds[i % len(kinds)]),
        )
        for i in range(20)
    ]
    options = {**proposer("same", target, other, 5)}
    with make_llm(
        target, [options], max_num_batched_tokens=24, num_gpu_blocks_override=24, block_size=8
    ) as llm:
        for _ in range(2):
            run(llm, requests)
        stats = llm.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_prefix_hit_tokens"] > 0
    drafted = stats["spec_decode_num_draft_tokens"]
    assert stats["spec_decode_num_accepted_tokens"] == drafted > 500
