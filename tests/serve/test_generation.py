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


class SlowReader:
    """Reads an output at each of its turns; one that comes too early waits in its hands."""

    def __init__(self, turns: int = 0):
        self.turns = asyncio.Semaphore(turns)
        self.read: list[tuple[int, RequestOutput]] = []

    async def __call__(self, index: int, output: RequestOutput) -> None:
        await self.turns.acquire()
        self.read.append((index, output))

    async def read_one(self) -> None:
        num_read = len(self.read)
        self.turns.release()
        while len(self.read) == num_read:
            await asyncio.sleep(0)


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
    (whole,) = processor(OutputKind.FINAL).process(news, 1.0)

    async def run() -> list[RequestOutput]:
        rng, generation = random.Random(seed), Generation(["r"], lambda ids: None)
        source, reader = processor(OutputKind.DELTA), SlowReader()
        feeding = asyncio.create_task(generation.feed(reader))
        await asyncio.sleep(0)
        for step in steps:
            for output in source.process(step, 1.0):
                generation.put(output)
            if rng.random() < share_read:
                await reader.read_one()
        for _ in range(NUM_STEPS):
            reader.turns.release()
        await feeding
        return [output for _, output in reader.read]

    read = asyncio.run(run())
    if share_read == 0:
        assert len(read) == 2  # the one that it held, and all others
    elif share_read == 1:
        assert len(read) == NUM_STEPS
    told = joined(read)
    assert told.finished
    assert told.outputs == whole.outputs
    for mine, theirs in zip(told.outputs, whole.outputs):
        assert mine.speculative == theirs.speculative
        assert mine.speculative_trace == theirs.speculative_trace


def finished(request_id: str) -> RequestOutput:
    return RequestOutput(request_id, None, [], finished=True)


def test_a_reader_that_need_not_wait_has_read_when_the_news_are_put() -> None:
    async def run() -> None:
        generation, read = Generation(["a", "b"], lambda ids: None), []

        async def reader(index: int, output: RequestOutput) -> None:
            read.append(index)

        feeding = asyncio.create_task(generation.feed(reader))
        await asyncio.sleep(0)
        for request_id in ("b", "a"):
            generation.put(finished(request_id))
            assert not feeding.done()
        assert read == [1, 0]
        await feeding

    asyncio.run(run())


def test_whoever_stops_waiting_takes_nothing_away() -> None:
    async def run() -> None:
        generation, reader = Generation(["a", "b"], lambda ids: None), SlowReader(turns=2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await generation.feed(reader)
        for request_id in ("b", "a"):
            generation.put(finished(request_id))
        await generation.feed(reader)
        assert [index for index, _ in reader.read] == [1, 0]

    asyncio.run(run())


def test_what_came_before_a_failure_is_read_before_it() -> None:
    async def run() -> None:
        generation, reader = Generation(["a"], lambda ids: None), SlowReader(turns=1)
        generation.put(RequestOutput("a", None, []))
        generation.fail(EngineDead("on fire"))
        with pytest.raises(EngineDead, match="on fire"):
            await generation.feed(reader)
        assert len(reader.read) == 1

    asyncio.run(run())


def test_a_failure_finds_a_reader_who_waits_in_vain() -> None:
    async def run() -> None:
        generation = Generation(["a"], lambda ids: None)
        asyncio.get_running_loop().call_soon(generation.fail, EngineDead("on fire"))
        with pytest.raises(EngineDead, match="on fire"):
            await generation.feed(SlowReader())

    asyncio.run(run())


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_reader_raises_ends_the_feeding_and_nobody_else(waits: bool) -> None:
    async def run() -> None:
        generation = Generation(["a"], lambda ids: None)

        async def reader(index: int, output: RequestOutput) -> None:
            if waits:
                await asyncio.sleep(0)
            raise ValueError("enough")

        feeding = asyncio.create_task(generation.feed(reader))
        await asyncio.sleep(0)
        generation.put(RequestOutput("a", None, []))  # as the engine does, and hears nothing of it
        with pytest.raises(ValueError, match="enough"):
            await feeding

    asyncio.run(run())


def test_whoever_is_cancelled_while_reading_is_told_where_it_stands() -> None:
    async def run() -> None:
        generation, ends = Generation(["a"], lambda ids: None), []

        async def reader(index: int, output: RequestOutput) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise

        feeding = asyncio.create_task(generation.feed(reader))
        await asyncio.sleep(0)
        generation.put(RequestOutput("a", None, []))
        feeding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await feeding
        await asyncio.sleep(0)
        assert ends == ["cancelled"]

    asyncio.run(run())


def test_closing_ends_what_is_unfinished_once() -> None:
    ended: list[str] = []

    async def run() -> None:
        generation, reader = Generation(["a", "b"], ended.extend), SlowReader(turns=1)
        generation.put(finished("a"))
        feeding = asyncio.create_task(generation.feed(reader))
        await asyncio.sleep(0)
        generation.close()
        generation.close()
        generation.put(finished("b"))
        feeding.cancel()

    asyncio.run(run())
    assert ended == ["b"]
