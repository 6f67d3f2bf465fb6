"""RequestLog: one JSON line on stderr for each request, however it ends."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nano.log import write_line
from nano.outputs import RequestOutput
from nano.serve.reply import Event, Json, Reply


@dataclass(slots=True)
class RequestRecord:
    """What came of one request. The last fields stay None where nothing was generated."""

    time: str  # of its arrival, UTC
    client: str | None  # None: through a Unix socket
    method: str
    path: str  # without the query, which may hold what is nobody's business
    request_id: str | None = None
    status: int | None = None  # None: no answer was begun
    seconds: float = 0.0  # until the last byte was handed over, or the client left
    has_client_left: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str] | None = None

    def count(self, outputs: Sequence[RequestOutput]) -> None:
        """Take in outputs, whole or in pieces."""
        self.prompt_tokens = self.prompt_tokens or 0
        self.completion_tokens = self.completion_tokens or 0
        self.finish_reasons = self.finish_reasons or []
        for output in outputs:
            if output.finished:
                self.prompt_tokens += len(output.prompt_token_ids)
            for completion in output.outputs:
                self.completion_tokens += len(completion.token_ids)
                if completion.finish_reason is not None:
                    self.finish_reasons.append(completion.finish_reason)

    def write(self) -> None:
        """Append the line to stderr."""
        write_line(json.dumps(asdict(self)))  # in ASCII: a line stays one whatever is in it


class RecordedReply(Reply):
    """`reply`, while `record` counts what goes into it."""

    def __init__(self, reply: Reply, record: RequestRecord):
        self._reply = reply
        self._record = record

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        self._record.count(outputs)
        return self._reply.whole(outputs)

    def opening(self) -> Iterator[Event]:
        return self._reply.opening()

    def news(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        self._record.count([output])
        return self._reply.news(prompt_index, output)

    def closing(self) -> Iterator[Event]:
        return self._reply.closing()

    def failure(self, error: Exception) -> Iterator[Event]:
        return self._reply.failure(error)


def recorded(reply: Reply, scope: Scope) -> Reply:
    """`reply`, counted in the record of the request, if one is kept."""
    record = scope["state"].get("record")
    return reply if record is None else RecordedReply(reply, record)


class RequestLog:
    """ASGI middleware. `scope["state"]["record"]` is open to who knows more of the request."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        client = scope.get("client")
        record = RequestRecord(
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            client=client and f"{client[0]}:{client[1]}",
            method=scope["method"],
            path=scope["path"],
        )
        state = scope.setdefault("state", {})
        state["record"] = record
        is_answered = False

        async def receive_news() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not is_answered:
                record.has_client_left = True
            return message

        async def send_news(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif not message.get("more_body", False):
                is_answered = True
            await send(message)

        try:
            await self._app(scope, receive_news, send_news)
        finally:
            record.request_id = state.get("request_id")
            record.seconds = round(time.monotonic() - begun, 6)
            record.write()
