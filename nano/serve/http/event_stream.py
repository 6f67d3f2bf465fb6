"""EventStream: an answer as server-sent events, whose generation ends with the connection."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nano.errors import NanoError
from nano.log import get_logger
from nano.outputs import RequestOutput
from nano.serve.generation import Generation
from nano.serve.http.errors import Refusal
from nano.serve.reply import Event, Reply

logger = get_logger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"  # a comment, for whoever closes connections that seem dead


class EventStream(StreamingResponse):
    """A generation in the events of `reply`. However the connection ends, it is closed."""

    def __init__(
        self,
        generation: Generation,
        reply: Reply,
        lateness: Callable[[RequestOutput], Refusal | None],
        keep_alive_interval: float,
    ):
        """`lateness` tells of an output whether a deadline ended it, which fails the stream;
        comments fill a silence every `keep_alive_interval` seconds.
        """
        self._generation = generation
        self._reply = reply
        self._lateness = lateness
        self._keep_alive_interval = keep_alive_interval
        self._last_time = asyncio.get_running_loop().time()  # when something was last sent
        super().__init__(
            self._pieces(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()

    async def stream_response(self, send: Send) -> None:
        # Beside the stream, so that a token costs no timer.
        keeping = asyncio.create_task(self._keep_alive(send))
        try:
            await super().stream_response(send)
        finally:
            keeping.cancel()
            # A comment that was held up by a slow reader may have come after the end.
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        loop, interval = asyncio.get_running_loop(), self._keep_alive_interval
        while True:
            silent_until = self._last_time + interval
            if loop.time() < silent_until:
                await asyncio.sleep(silent_until - loop.time())
            else:
                self._last_time = loop.time()
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def _pieces(self) -> AsyncIterator[bytes]:
        """What is written at once: the events of one output."""
        reply, loop = self._reply, asyncio.get_running_loop()
        piece = _Piece()
        try:
            piece.add(reply.opening())
            if piece:
                yield piece.take()
            async for prompt_index, output in self._generation:
                self._last_time = loop.time()
                late = self._lateness(output)
                if late is not None:
                    _strip_end(output)
                if late is None or output.outputs:
                    piece.add(reply.news(prompt_index, output))
                    if piece:
                        yield piece.take()
                if late is not None:
                    raise late
            piece.add(reply.closing())
        except Exception as error:
            if not isinstance(error, NanoError | Refusal):
                logger.exception("a stream failed")
            piece.add(reply.failure(error))
        yield piece.take()


class _Piece(list[bytes]):
    """Encoded events that are still to be written."""

    def add(self, events: Iterator[Event]) -> None:
        for event in events:  # which may raise: those before are to be written all the same
            self.append(event.encode())

    def take(self) -> bytes:
        data = b"".join(self)
        self.clear()
        return data


def _strip_end(output: RequestOutput) -> None:
    """Leave of the last output of a late request what came before its end, if there is any."""
    output.finished = False
    output.outputs = [one for one in output.outputs if one.text or one.token_ids]
    for completion in output.outputs:
        completion.finish_reason = completion.speculative = None
