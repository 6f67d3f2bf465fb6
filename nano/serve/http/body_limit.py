"""BodyLimit: a body that is too long is refused before it is read."""

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano.serve.http.errors import Refusal, error_response

# For so long the rest is read and dropped before the connection ends, so that the answer arrives:
# closing a socket with unread bytes resets it, and takes from the caller what it has not read.
LINGER_SECONDS = 2.0


class BodyLimit:
    """ASGI middleware: 413 for a body of more than `max_bytes`, by what its Content-Length says or
    by what has arrived. The answer goes out at once, and the connection ends soon after it.

    Starlette's own has no say in what the answer looks like.
    """

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = 0
        is_refused = False

        async def receive_some() -> Message:
            nonlocal num_bytes, is_refused
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                is_refused = True
                raise self._refusal()  # in a route: its error handler answers
            return message

        async def send_and_linger(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if not is_refused or not is_last:
                await send(message)
                return
            await send({**message, "more_body": True})
            await drop_rest(receive)
            await send({"type": "http.response.body", "body": b""})

        declared = Headers(scope=scope).get("content-length")  # httptools: a number, or a 400
        if declared is not None and int(declared) > self._max_bytes:
            is_refused = True
            await error_response(scope, self._refusal())(scope, receive, send_and_linger)
            return
        await self._app(scope, receive_some, send_and_linger)

    def _refusal(self) -> Refusal:
        return Refusal(
            413,
            f"the body must have at most {self._max_bytes} bytes (--max-body-bytes)",
            code="request_too_large",
            headers={"Connection": "close"},
        )


async def drop_rest(receive: Receive) -> None:
    """Read on until the body ends, the caller leaves, or it has been long enough."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (await receive()).get("more_body"):
                pass
