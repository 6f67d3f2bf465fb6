"""EventStream: an answer as server-sent events, whose generation ends with the connection."""

from collections.abc import AsyncIterator

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from nano.errors import NanoError
from nano.log import get_logger
from nano.serve.async_engine import Generation
from nano.serve.reply import Reply

logger = get_logger(__name__)


class EventStream(StreamingResponse):
    """A generation in the events of `reply`. However the connection ends, it is closed."""

    def __init__(self, generation: Generation, reply: Reply):
        self._generation = generation
        super().__init__(
            stream_events(generation, reply),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


async def stream_events(generation: Generation, reply: Reply) -> AsyncIterator[str]:
    try:
        for event in reply.opening():
            yield event.encode()
        async for prompt_index, output in generation:
            for event in reply.news(prompt_index, output):
                yield event.encode()
        for event in reply.closing():
            yield event.encode()
    except Exception as error:
        if not isinstance(error, NanoError):
            logger.exception("a stream failed")
        for event in reply.failure(error):
            yield event.encode()
