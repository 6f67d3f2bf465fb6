"""BodyLimit: a body that is too long is refused before it is read."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano.serve.http.errors import Refusal, error_response


class BodyLimit:
    """ASGI middleware: 413 for a body of more than `max_bytes`, by what its Content-Length says or
    by what has arrived. The rest is not read: the connection ends with the answer.

    Starlette's own has no say in what the answer looks like.
    """

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length")  # h11 lets numbers through only
        if declared is not None and int(declared) > self._max_bytes:
            await error_response(scope, self._refusal())(scope, receive, send)
            return
        num_bytes = 0

        async def receive_some() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._refusal()  # in a route: its error handler answers
            return message

        await self._app(scope, receive_some, send)

    def _refusal(self) -> Refusal:
        return Refusal(
            413,
            f"the body must have at most {self._max_bytes} bytes (--max-body-bytes)",
            code="request_too_large",
            headers={"Connection": "close"},
        )
