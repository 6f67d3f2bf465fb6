"""One call of the HTTP application without HTTP: what `post` gets is what a client would get."""

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

_JSON = b"application/json"


@dataclass(slots=True)
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""


async def post(app: ASGIApp, path: str, body: bytes) -> Answer:
    """The application's answer to a JSON body. Cancelling is what a client does who leaves."""
    headers = [(b"content-type", _JSON), (b"content-length", str(len(body)).encode())]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    answer = Answer()
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # nobody disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        elif message["type"] == "http.response.body":
            answer.body += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception:
        if not answer.body:  # or else it is answered, and told for the server's log only
            raise
    return answer
