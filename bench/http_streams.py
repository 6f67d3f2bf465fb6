"""A client for load: requests over raw connections, what they got, vanishing on purpose."""

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any

READ_BYTES = 1 << 16
_EVENT = re.compile(rb"^data: (\{.*\})\r?$", re.MULTILINE)

Json = dict[str, Any]


@dataclass(slots=True)
class Received:
    """The answer to one request. A stream's tokens are put together, `error` is its error event."""

    status: int
    headers: dict[str, str]
    body: bytes
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: Json | None = None
    is_done: bool = False  # a stream came to its [DONE]


async def post(port: int, path: str, body: bytes, num_bytes: int | None = None) -> Received | None:
    """Send and read to the end; None after vanishing, once `num_bytes` of the answer were read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        writer.write(head.encode() + body)
        data = bytearray()
        while num_bytes is None or len(data) < num_bytes:
            piece = await reader.read(READ_BYTES)
            if not piece:
                return parse(bytes(data))
            data += piece
        return None
    finally:
        writer.transport.abort()


def parse(data: bytes) -> Received:
    """An answer that was read to its end."""
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *fields = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (f.partition(": ") for f in fields)}
    received = Received(int(status_line.split()[1]), headers, body)
    for match in _EVENT.finditer(body):
        event = json.loads(match[1])
        if "error" in event:
            received.error = event["error"]
        for choice in event.get("choices", ()):
            received.token_ids += choice.get("token_ids") or ()
            received.finish_reason = choice["finish_reason"] or received.finish_reason
    received.is_done = b"data: [DONE]" in body
    return received
