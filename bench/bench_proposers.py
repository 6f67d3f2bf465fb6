"""What guessing from text costs: time per token of advance and propose at 32,768 tokens of context.

    pytest bench/bench_proposers.py

Each round takes one token in and asks for 8 drafts, as a step does that accepts none. `extra_info`
holds the bytes that the proposer keeps per token of context.

"random" repeats nothing, "repetitive" is one passage of 500 tokens over and over, "words" is drawn
from 2,000 words as often as text uses its words.
"""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nano.sampling_params import SamplingParams
from nano.spec.ngram import NgramProposer
from nano.spec.proposer import TextProposer
from nano.spec.suffix import SuffixProposer
from nano.step import NewRequest

NUM_TOKENS = 32_768
NUM_ROUNDS = 4000
NUM_DRAFTS = 8
MAKERS: dict[str, Callable[[], TextProposer]] = {
    "ngram": lambda: NgramProposer(2, 4),
    "suffix": lambda: SuffixProposer(24, 10_000, 1.0, 0.1),
}


def make_text(kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    num_tokens = NUM_TOKENS + NUM_ROUNDS
    if kind == "random":
        text = rng.integers(0, 150_000, num_tokens)
    elif kind == "repetitive":
        text = np.tile(rng.integers(0, 150_000, 500), num_tokens // 500 + 1)[:num_tokens]
    else:
        weights = 1 / np.arange(1, 2001)
        text = rng.choice(2000, num_tokens, p=weights / weights.sum())
    return text.astype(np.int32)


def take_in(proposer: TextProposer, text: np.ndarray) -> None:
    """The context, as a prompt in chunks of 512 tokens."""
    prompt = text[:NUM_TOKENS]
    proposer.start(
        NewRequest("request", prompt.tolist(), NUM_TOKENS, 0, [], SamplingParams(seed=0))
    )
    for end in range(512, NUM_TOKENS + 1, 512):
        proposer.advance("request", prompt[:end])


@pytest.mark.parametrize("kind", ["random", "repetitive", "words"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_token_at_32k_of_context(benchmark: BenchmarkFixture, name: str, kind: str) -> None:
    text = make_text(kind)
    tracemalloc.start()
    measured = MAKERS[name]()
    take_in(measured, text)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    benchmark.extra_info["bytes_per_token"] = round(num_bytes / NUM_TOKENS)
    proposer = MAKERS[name]()
    take_in(proposer, text)
    ends = iter(range(NUM_TOKENS + 1, NUM_TOKENS + NUM_ROUNDS + 1))

    def step() -> int:
        known = text[: next(ends)]
        proposer.advance("request", known)
        return len(proposer.propose("request", known, NUM_DRAFTS))

    num_drafts = benchmark.pedantic(step, rounds=NUM_ROUNDS)
    assert kind == "words" or num_drafts == (NUM_DRAFTS if kind == "repetitive" else 0)


@pytest.mark.parametrize("name", MAKERS)
def test_a_prompt_of_32k(benchmark: BenchmarkFixture, name: str) -> None:
    """The context alone, in chunks; divide by 32,768."""
    text = make_text("words")
    benchmark.pedantic(lambda: take_in(MAKERS[name](), text), rounds=3)
