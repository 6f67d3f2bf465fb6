"""What the core says reaches its readers in turns of the event loop, which has other work too."""

import asyncio
import threading
import time
from collections import deque
from typing import Any, cast

from nano.engine.client import EngineClient
from nano.engine.input_processor import InputProcessor
from nano.engine.output_processor import OutputKind
from nano.errors import EngineDead
from nano.outputs import FinishReason, RequestOutput, TokenOutput
from nano.serve.async_engine import AsyncEngine
from tests.engine.test_output_processor import news, prepared
from tests.vocabularies import byte_tokenizer

NUM_STEPS = 200
NUM_MEANWHILE = 10  # steps while a reader is busy


class TalkativeCore:
    """Has its next output ready whenever it is asked."""

    def __init__(self) -> None:
        self.said: deque[list[TokenOutput]] = deque()
        self.is_asked = threading.Semaphore(0)

    def add(self, requests: list[Any]) -> None:
        for step in range(NUM_STEPS):
            is_last = step == NUM_STEPS - 1
            reason = FinishReason.LENGTH if is_last else None
            self.said.append([news(b"a", "r", finish_reason=reason)])

    def recv(self) -> list[TokenOutput]:
        self.is_asked.acquire()
        if not self.said:
            raise EngineDead("it has said all")
        return self.said.popleft()

    def close(self) -> None:
        pass


class Inputs:
    tokenizer = byte_tokenizer()


def test_what_arrives_while_readers_are_busy_waits_for_the_next_turn_and_comes_as_one() -> None:
    core = TalkativeCore()
    turns: list[int] = []  # of something else that wants to run
    read: list[RequestOutput] = []

    async def run() -> None:
        engine = AsyncEngine(cast(EngineClient, core), cast(InputProcessor, Inputs()))
        engine.start()
        generation = engine.generate([prepared("r")], OutputKind.DELTA)

        async def reader(index: int, output: RequestOutput) -> None:
            read.append(output)
            num_left = max(0, len(core.said) - NUM_MEANWHILE)
            for _ in range(NUM_MEANWHILE):
                core.is_asked.release()
            while len(core.said) > num_left:
                time.sleep(0.0005)  # not asyncio's: it is busy

        async def something_else() -> None:
            while not feeding.done():
                turns.append(len(read))
                await asyncio.sleep(0)

        feeding = asyncio.create_task(generation.feed(reader))
        other = asyncio.create_task(something_else())
        core.is_asked.release()
        await feeding
        await other

    asyncio.run(run())
    assert sum(len(output.outputs[0].token_ids) for output in read) == NUM_STEPS
    assert len(read) < NUM_STEPS / 2
    assert len(set(turns)) >= len(read) - 1  # it ran between any two of them
