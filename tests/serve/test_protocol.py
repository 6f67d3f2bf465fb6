"""Heads and trailers are bounded, bodies are not (BodyLimit is for them)."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from nano.serve.http.protocol import MAX_HEAD_BYTES, HttpProtocol

PIECE = 1 << 12
START = b"POST /path HTTP/1.1\r\nHost: x\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
MANY = MAX_HEAD_BYTES // PIECE


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        assert not self.is_closed
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    num_bytes, more = 0, True
    while more:
        message = await receive()
        num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
    length = str(len(str(num_bytes))).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": str(num_bytes).encode()})


def answer(pieces: Iterable[bytes]) -> Transport:
    """What becomes of a connection over which `pieces` come."""
    transport = Transport()

    async def run() -> None:
        config = uvicorn.Config(app, http=HttpProtocol, log_config=None)
        config.load()
        protocol = HttpProtocol(config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(transport)
        for piece in pieces:
            if transport.is_closed:
                break
            protocol.data_received(piece)
            for _ in range(5):
                await asyncio.sleep(0)

    asyncio.run(run())
    return transport


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /" + b"x" * PIECE, *[b"x" * PIECE] * MANY],
        [START + b"Name: ", *[b"x" * PIECE] * MANY],
        [START, *[b"Name: " + b"x" * (PIECE - 8) + b"\r\n"] * MANY],
        [CHUNKED + b"0\r\nName: ", *[b"x" * PIECE] * MANY],
    ],
    ids=["path", "header", "headers", "trailer"],
)
def test_a_head_that_does_not_end_ends_the_connection(pieces: list[bytes]) -> None:
    transport = answer([*pieces, *[b"x" * PIECE] * 2])
    assert transport.is_closed
    assert transport.written.startswith(b"HTTP/1.1 400 ")
    assert f"at most {MAX_HEAD_BYTES} bytes".encode() in transport.written


def test_heads_that_fit_and_bodies_of_any_length_come_in_one_after_the_other() -> None:
    head = START + b"Name: " + b"x" * (MAX_HEAD_BYTES - 200) + b"\r\n"
    length = 5 * MAX_HEAD_BYTES
    body = [b"x" * PIECE] * (length // PIECE)
    declared = [head + f"Content-Length: {length}\r\n\r\n".encode(), *body]
    chunk = f"{PIECE:x}\r\n".encode() + b"x" * PIECE + b"\r\n"
    chunked = [head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * len(body), b"0\r\n\r\n"]
    without = [head + b"Content-Length: 0\r\n\r\n"]
    transport = answer([*declared, *chunked, *without, *without, *declared])
    assert not transport.is_closed
    assert transport.written.count(b"HTTP/1.1 200 OK") == 5
    assert transport.written.count(str(length).encode()) == 3
