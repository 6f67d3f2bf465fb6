"""Codec: what one step of 256 running requests, and one long prompt, cost on the wire."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nano.engine.codec import decode, encode
from nano.engine.messages import (
    AddRequests,
    EngineOutputs,
    EngineRequest,
    FromCore,
    ToCore,
    TokenOutput,
)
from nano.sampling_params import SamplingParams
from nano.step import TokenLogprobs

NUM_OUTPUTS = 256
NUM_PROMPT_TOKENS = 1000


def outputs(with_logprobs: bool) -> EngineOutputs:
    return EngineOutputs(
        [
            TokenOutput(
                request_id=f"cmpl-{i:032x}-{i}-0",
                new_token_ids=[i],
                logprobs=TokenLogprobs([[i, 1, 2, 3]], [[-0.5, -1.5, -2.5, -3.5]], [1])
                if with_logprobs
                else None,
            )
            for i in range(NUM_OUTPUTS)
        ]
    )


def request() -> AddRequests:
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, seed=1, stop=("\n",))
    token_ids = [(i * 7919) % 150_000 for i in range(NUM_PROMPT_TOKENS)]
    return AddRequests([EngineRequest("cmpl-1", token_ids, params, 1.0, (2,))])


MESSAGES: dict[str, ToCore | FromCore] = {
    "outputs": outputs(with_logprobs=False),
    "outputs_with_logprobs": outputs(with_logprobs=True),
    "request": request(),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_encode(benchmark: BenchmarkFixture, name: str) -> None:
    data = benchmark(encode, MESSAGES[name])
    assert decode(data) == MESSAGES[name]


@pytest.mark.parametrize("name", MESSAGES)
def test_decode(benchmark: BenchmarkFixture, name: str) -> None:
    assert benchmark(decode, encode(MESSAGES[name])) == MESSAGES[name]
