"""EventStream: an answer as server-sent events, whose generation ends with the connection."""

import asyncio
from collections.abc import Callable, Iterator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nano.errors import NanoError
from nano.log import get_logger
from nano.outputs import RequestOutput
from nano.serve.generation import Generation
from nano.serve.http.errors import Refusal
from nano.serve.reply import Event, Reply

logger = get_logger(__name__)

# A scope's key for the server's own `send`: between its head and its end a stream is of no interest
# to what lies around the routes, and every layer would be passed by every token.
DIRECT_SEND = "nano.send"
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
            (),  # `stream_response` does not ask for it
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._direct_send = scope[DIRECT_SEND]
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        # Beside the stream, so that a token costs no timer.
        keeping = asyncio.create_task(self._keep_alive(self._direct_send))
        try:
            await self._send_events(self._direct_send)
        finally:
            keeping.cancel()
            # A comment that was held up by a slow reader may have come after the end.
            await asyncio.gather(keeping, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        loop, interval = asyncio.get_running_loop(), self._keep_alive_interval
        while True:
            silent_until = self._last_time + interval
            if loop.time() < silent_until:
                await asyncio.sleep(silent_until - loop.time())
            else:
                self._last_time = loop.time()
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def _send_events(self, send: Send) -> None:
        reply = self._reply

        async def send_news(prompt_index: int, output: RequestOutput) -> None:
            late = self._lateness(output)
            if late is not None:
                _strip_end(output)
            if late is None or output.outputs:
                await self._send(send, reply.news(prompt_index, output))
            if late is not None:
                raise late

        try:
            await self._send(send, reply.opening())
            await self._generation.feed(send_news)
            await self._send(send, reply.closing())
        except Exception as error:
            if not isinstance(error, NanoError | Refusal):
                logger.exception("a stream failed")
            await self._send(send, reply.failure(error))

    async def _send(self, send: Send, events: Iterator[Event]) -> None:
        """Send events in one piece; if one of them raises, those before it all the same."""
        self._last_time = asyncio.get_running_loop().time()
        data = bytearray()
        try:
            for event in events:
                data += event.encode()
        finally:
            if data:
                await send({"type": "http.response.body", "body": bytes(data), "more_body": True})


def _strip_end(output: RequestOutput) -> None:
    """Leave of the last output of a late request what came before its end, if there is any."""
    output.finished = False
    output.outputs = [one for one in output.outputs if one.text or one.token_ids]
    for completion in output.outputs:
        completion.finish_reason = completion.speculative = None
