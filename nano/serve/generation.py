"""Generation: what comes of the prompts of one call, for as long as somebody wants it."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from nano.errors import EngineUnavailable
from nano.outputs import RequestOutput
from nano.serve.eager import run_eagerly

Reader = Callable[[int, RequestOutput], Coroutine[Any, Any, None]]  # of (prompt index, output)


@dataclass(frozen=True, slots=True)
class _Feeding:
    reader: Reader
    end: asyncio.Future[None]  # of what it reads
    task: asyncio.Task[Any]  # that waits for the end


class Generation:
    """Outputs from the engine, which `put`s them, to the one that `feed` is told of.

    `close` aborts what is unfinished; closing a finished generation does nothing.

    A slow reader holds nobody up and loses nothing: what it has not read of a prompt grows into one
    output, no larger than the answer.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]):
        self._unfinished = dict(zip(request_ids, itertools.count()))  # request id -> prompt index
        self._abort = abort
        self._unread: dict[int, RequestOutput] = {}  # by prompt index, the oldest news first
        self._fault: EngineUnavailable | None = None
        self._feeding: _Feeding | None = None
        self._is_reading = False
        self._rest: asyncio.Task[None] | None = None  # of a reading that has to wait

    async def feed(self, reader: Reader) -> None:
        """Let `reader` read each output, one after the other, until every prompt is finished.

        A reader that does not have to wait has read before `put` returns. Raises what it raises,
        and `EngineUnavailable` if the core or the server ends first. Cancelled while there is
        nothing to read, it takes nothing away.
        """
        task = asyncio.current_task()
        assert task is not None
        self._feeding = _Feeding(reader, asyncio.get_running_loop().create_future(), task)
        self._go_on()
        try:
            await self._feeding.end
        finally:
            self._feeding = None
            if self._rest is not None:
                self._rest.cancel()

    def put(self, output: RequestOutput) -> None:
        """Take in the next output of one prompt, which holds only what is new."""
        index = self._unfinished.get(output.request_id)
        if index is None:  # closed meanwhile
            return
        unread = self._unread.get(index)
        if unread is None:
            self._unread[index] = output
        else:
            unread.append(output)
        self._go_on()

    def fail(self, error: EngineUnavailable) -> None:
        """End it with `error`, after what is unread."""
        self._fault = error
        self._go_on()

    def close(self) -> None:
        unfinished, self._unfinished = list(self._unfinished), {}
        if unfinished:
            self._abort(unfinished)

    def _go_on(self) -> None:
        if self._feeding is not None and not self._is_reading:
            self._rest = run_eagerly(self._read(self._feeding), self._feeding.task)

    async def _read(self, feeding: "_Feeding") -> None:
        """Whatever there is, and perhaps the end."""
        reader, end = feeding.reader, feeding.end
        self._is_reading = True
        try:
            while self._unread:
                index = next(iter(self._unread))
                output = self._unread.pop(index)
                if output.finished:
                    del self._unfinished[output.request_id]
                await reader(index, output)
            if self._unfinished and self._fault is not None:
                raise self._fault
            if not self._unfinished and not end.done():
                end.set_result(None)
        except Exception as error:
            if not end.done():
                end.set_exception(error)
        finally:
            self._is_reading = False
