"""RequestIds: every answer says which call it is to."""

import re
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano.serve.http.errors import Refusal, error_response

HEADER = "X-Request-Id"
MAX_LENGTH = 512
_VALID = re.compile(r"[!-~]+")  # visible ASCII: safe in a header, a log and a URL of someone's tool


class RequestIds:
    """ASGI middleware: `scope["state"]["request_id"]` is the caller's X-Request-Id, or a new one,
    and comes back as a header of the answer. One that is not valid is a 400. A route whose body
    names its request writes it there.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist(HEADER)
        refusal = _refusal(given)
        state = scope.setdefault("state", {})
        state["request_id"] = given[0] if given and refusal is None else uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        if refusal is not None:
            await error_response(scope, refusal)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)


def _refusal(given: list[str]) -> Refusal | None:
    if len(given) > 1:
        return Refusal(400, f"{HEADER} must come once, got {len(given)} of them", HEADER)
    for request_id in given:
        if len(request_id) > MAX_LENGTH:
            limit = f"at most {MAX_LENGTH} characters, got {len(request_id)}"
            return Refusal(400, f"{HEADER} must have {limit}", HEADER)
        if not _VALID.fullmatch(request_id):
            limit = "visible ASCII characters only"
            return Refusal(400, f"{HEADER} must have {limit}, got {request_id!r}", HEADER)
    return None
