"""Many streams at once, and what became of each."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tests.serve.server import Server

LONG = {"prompt": "Once", "max_tokens": 30_000, "ignore_eos": True}


@dataclass
class Ending:
    """How one call ended."""

    status: int = 0  # of HTTP; 0 if the connection broke before
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None  # from the body or an event
    is_broken: bool = False  # the connection broke

    def take(self, body: dict[str, Any]) -> None:
        self.error = body.get("error", self.error)
        for choice in body.get("choices", ()):
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason


def run_streams(
    server: Server, bodies: Sequence[dict[str, Any]], then: Callable[[], object]
) -> list[Ending]:
    """Stream all of `bodies` at once; when each has had its first event, call `then` in a thread.
    Returns when all have ended. Bodies with "stream": False are sent too, but not waited for.
    """
    return asyncio.run(_run(server, bodies, then))


async def _run(
    server: Server, bodies: Sequence[dict[str, Any]], then: Callable[[], object]
) -> list[Ending]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
        begun = [asyncio.Event() for _ in bodies]
        calls = [asyncio.create_task(_call(http, *pair)) for pair in zip(bodies, begun)]
        for event in begun:
            await event.wait()
        await asyncio.to_thread(then)
        return await asyncio.gather(*calls)


async def _call(http: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Event) -> Ending:
    ending = Ending()
    if not body.get("stream", True):
        begun.set()
    try:
        async with http.stream("POST", "/v1/completions", json={"stream": True, **body}) as reply:
            ending.status = reply.status_code
            if reply.headers["content-type"] == "application/json":
                ending.take(json.loads(await reply.aread()))
            unread = b""  # not `aiter_lines`, for which texts hold line ends
            async for part in reply.aiter_bytes():
                *events, unread = (unread + part).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        ending.take(json.loads(event.removeprefix(b"data: ")))
                        begun.set()
    except httpx.TransportError:
        ending.is_broken = True
    begun.set()
    return ending
