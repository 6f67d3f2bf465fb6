"""What of a stream is not read for a while reads like one output, and nothing of it is lost."""

import asyncio
import random

import pytest

from nano.engine.output_processor import OutputKind, OutputProcessor
from nano.errors import EngineDead
from nano.outputs import FinishReason, RequestOutput, SpeculationReport, TokenOutput
from nano.serve.generation import Generation
from nano.speculation import DraftRecord
from nano.step import TokenLogprobs
from tests.engine.test_output_processor import prepared
from tests.vocabularies import byte_tokenizer

NUM_STEPS = 12
WORDS = ["é", "€", "a", "bc", "日本"]


def story(seed: int) -> dict[str, list[TokenOutput]]:
    """What the core says of two completions, step by step. Characters are cut anywhere."""
    rng = random.Random(seed)
    told: dict[str, list[TokenOutput]] = {}
    for child_id in ("0_r", "1_r"):
        data = "".join(rng.choices(WORDS, k=30)).encode()
        news = told[child_id] = []
        for step in range(NUM_STEPS):
            token_ids, data = list(data[:3]), data[3:]
            logprobs = [[-rng.random(), -9.0] for _ in token_ids]
            news.append(
                TokenOutput(
                    child_id,
                    token_ids,
                    logprobs=TokenLogprobs([[i, 7] for i in token_ids], logprobs, [1] * 3),
                    draft=DraftRecord(step, "a", [*token_ids[:-1], 1, 2], token_ids),
                )
            )
        news[-1].finish_reason = FinishReason.LENGTH
    return told


def processor(kind: OutputKind) -> OutputProcessor:
    made = OutputProcessor(byte_tokenizer())
    report = SpeculationReport(True, {"a": 4})
    request = prepared(n=2, report=report, shows_trace=True, traces_drafts=True, logprobs=1)
    made.register(request, kind)
    return made


def joined(read: list[RequestOutput]) -> RequestOutput:
    """What somebody has who keeps all that was read."""
    whole = read[0]
    for output in read[1:]:
        whole.append(output)
    whole.outputs.sort(key=lambda completion: completion.index)
    return whole


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share_read", [0.0, 0.3, 1.0])
def test_the_news_are_the_whole_answer_however_seldom_they_are_read(
    seed: int, share_read: float
) -> None:
    steps = list(zip(*story(seed).values()))
    news = [output for step in steps for output in step]
    (whole,) = processor(OutputKind.FINAL).process(news, 1.0).request_outputs

    async def run() -> list[RequestOutput]:
        rng, generation = random.Random(seed), Generation(["r"], lambda ids: None)
        source, read = processor(OutputKind.DELTA), []
        for step in steps:
            for output in source.process(step, 1.0).request_outputs:
                generation.put(output)
            if rng.random() < share_read:
                read.append((await anext(generation))[1])
        return read + [output async for _, output in generation]

    read = asyncio.run(run())
    if share_read == 0:
        assert len(read) == 1
    elif share_read == 1:
        assert len(read) == NUM_STEPS
    told = joined(read)
    assert told.finished
    assert told.outputs == whole.outputs
    for mine, theirs in zip(told.outputs, whole.outputs):
        assert mine.speculative == theirs.speculative
        assert mine.speculative_trace == theirs.speculative_trace


def test_whoever_stops_waiting_takes_nothing_away() -> None:
    async def run() -> None:
        generation = Generation(["a", "b"], lambda ids: None)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await anext(generation)
        for request_id in ("b", "a"):
            generation.put(RequestOutput(request_id, None, [], finished=True))
        assert [index async for index, _ in generation] == [1, 0]

    asyncio.run(run())


def test_what_came_before_a_failure_is_read_before_it() -> None:
    async def run() -> None:
        generation = Generation(["a"], lambda ids: None)
        generation.put(RequestOutput("a", None, []))
        generation.fail(EngineDead("on fire"))
        assert (await anext(generation))[1].request_id == "a"
        with pytest.raises(EngineDead, match="on fire"):
            await anext(generation)
        with pytest.raises(StopAsyncIteration):
            await anext(generation)

    asyncio.run(run())


def test_closing_ends_what_is_unfinished_once() -> None:
    ended: list[str] = []

    async def run() -> None:
        generation = Generation(["a", "b"], ended.extend)
        generation.put(RequestOutput("a", None, [], finished=True))
        await anext(generation)
        generation.close()
        generation.close()
        generation.put(RequestOutput("b", None, [], finished=True))

    asyncio.run(run())
    assert ended == ["b"]
