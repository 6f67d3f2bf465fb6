"""Front-end work per token: the detokeniser alone, beside DecodeStream, and the whole of process().

    pytest bench/bench_detokenizer.py

Each round handles NUM_TOKENS tokens of one request, so tokens/s is NUM_TOKENS * OPS.
"""

import random
from typing import Any

import pytest
from tokenizers.decoders import DecodeStream

from nano.engine.detokenizer import IncrementalDetokenizer
from nano.engine.input_processor import PreparedRequest
from nano.engine.messages import EngineRequest, TokenOutput
from nano.engine.output_processor import OutputKind, OutputProcessor
from nano.engine.tokenizer import Tokenizer
from nano.outputs import FinishReason
from nano.sampling_params import SamplingParams
from nano.step import TokenLogprobs
from tests.vocabularies import smollm2_tokenizer

NUM_TOKENS = 1000
TEXT = (
    "The quick brown fox jumps over 13 lazy dogs; 日本語 and 🫠 too.\n\n    def f(x): return x\n"
    * 40
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return smollm2_tokenizer()


@pytest.fixture(scope="module", params=["text", "random ids"])
def token_ids(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> list[int]:
    if request.param == "text":
        return tokenizer.encode(TEXT)[:NUM_TOKENS]
    rng = random.Random(0)
    return [rng.randrange(tokenizer.vocab_size) for _ in range(NUM_TOKENS)]


def test_detokenizer(benchmark: Any, tokenizer: Tokenizer, token_ids: list[int]) -> None:
    def run() -> str:
        detokenizer = IncrementalDetokenizer(tokenizer, [5], skip_special_tokens=True)
        return "".join([detokenizer.step(token_id) for token_id in token_ids]) + detokenizer.flush()

    assert benchmark(run) == tokenizer.decode(token_ids)


def test_decode_stream_of_tokenizers(
    benchmark: Any, tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    def run() -> int:
        stream = DecodeStream(skip_special_tokens=True)
        return len([stream.step(tokenizer._backend, token_id) for token_id in token_ids])

    assert benchmark(run) == NUM_TOKENS


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (OutputKind.FINAL, {}),
        (OutputKind.DELTA, {}),
        (OutputKind.DELTA, {"stop": ["never seen", "\n\n\n\n", "STOP", "</tool>"]}),
        (OutputKind.DELTA, {"logprobs": 5}),
    ],
    ids=["final", "delta", "delta, 4 stop strings", "delta, 5 logprobs"],
)
def test_process_one_token_a_step(
    benchmark: Any,
    tokenizer: Tokenizer,
    token_ids: list[int],
    kind: OutputKind,
    params: dict[str, Any],
) -> None:
    sampling_params = SamplingParams(seed=0, **params)
    child = EngineRequest("r", [5], sampling_params, arrival_time=0.0)
    prepared = PreparedRequest("r", None, [5], sampling_params, 0.0, [child])
    outputs = [TokenOutput("r", [token_id]) for token_id in token_ids]
    outputs[-1].finish_reason = FinishReason.LENGTH
    if sampling_params.logprobs is not None:
        for output, token_id in zip(outputs, token_ids):
            ids, logprobs = [token_id, 1, 2, 3, 4, 5], [-1.0, -1.0, -2.0, -3.0, -4.0, -5.0]
            output.logprobs = TokenLogprobs([ids], [logprobs], [1])

    def run() -> bool:
        processor = OutputProcessor(tokenizer)
        processor.register(prepared, kind)
        for output in outputs:
            seen = list(processor.process([output], now=1.0))
        return seen[0].finished

    assert benchmark(run)
