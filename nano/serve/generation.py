"""Generation: what comes of the prompts of one call, for as long as somebody wants it."""

import asyncio
import itertools
from collections.abc import Callable, Sequence

from nano.errors import EngineUnavailable
from nano.outputs import RequestOutput


class Generation:
    """An async iterator of (prompt index, output).

    Ends when every prompt has had its finished output; raises `EngineUnavailable` if the core or
    the server ends first. `close` aborts what is unfinished; closing a finished generation does
    nothing.

    A slow reader holds nobody up and loses nothing: what it has not read of a prompt grows into one
    output, no larger than the answer.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]):
        self._unfinished = dict(zip(request_ids, itertools.count()))  # request id -> prompt index
        self._abort = abort
        self._unread: dict[int, RequestOutput] = {}  # by prompt index, the oldest news first
        self._fault: EngineUnavailable | None = None
        self._has_news = asyncio.Event()

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        """Cancelled, it takes nothing away."""
        if not self._unfinished:
            raise StopAsyncIteration
        while not self._unread:
            if self._fault is not None:
                self._unfinished.clear()
                raise self._fault
            self._has_news.clear()
            await self._has_news.wait()
        index = next(iter(self._unread))
        output = self._unread.pop(index)
        if output.finished:
            del self._unfinished[output.request_id]
        return index, output

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
        self._has_news.set()

    def fail(self, error: EngineUnavailable) -> None:
        """End it with `error`, after what is unread."""
        self._fault = error
        self._has_news.set()

    def close(self) -> None:
        unfinished, self._unfinished = list(self._unfinished), {}
        if unfinished:
            self._abort(unfinished)
