"""Calls that are turned away at the door, and streams that pass the layers around the routes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from nano.checkpoint.hf_config import load_decoder_config
from nano.config import EngineConfig
from nano.engine.input_processor import InputProcessor
from nano.engine.tokenizer import Tokenizer
from nano.serve.app import create_app
from nano.serve.async_engine import AsyncEngine
from nano.serve.door import Door
from nano.serve.http.body_limit import BodyLimit
from nano.serve.http.errors import Refusal
from nano.serve.openai import routes
from nano.serve.options import ServerOptions
from tests.serve.drafting import DraftingClient

PAGE = "https://example.org"
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture
def app(checkpoint: Path) -> FastAPI:
    core = DraftingClient()
    input_processor = InputProcessor(
        EngineConfig.from_args({"max_model_len": core.ready.max_model_len}),
        load_decoder_config(checkpoint),
        Tokenizer.from_folder(checkpoint),
        num_kv_slots=core.ready.num_kv_slots,
        proposers=core.ready.proposers,
    )
    options = ServerOptions(
        served_model_name=("tiny",), allowed_origins=(PAGE,), access_log="json", max_lag_ms=None
    )
    return create_app(AsyncEngine(core, input_processor), options)


@pytest.fixture
def http(app: FastAPI) -> Iterator[TestClient]:
    with TestClient(app) as http:
        yield http


def refuse() -> None:
    raise Refusal(429, "later", code="queue_full", headers={"Retry-After": "7"})


@pytest.mark.parametrize("path", GENERATING)
def test_who_is_turned_away_is_answered_like_everybody_else(
    http: TestClient,
    app: FastAPI,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    path: str,
) -> None:
    app.state.front_end.engine.drain()
    let_in: list[str] = []
    inner = BodyLimit.__call__

    async def watch(self: BodyLimit, scope: Scope, receive: Receive, send: Send) -> None:
        let_in.append(scope["path"])
        await inner(self, scope, receive, send)

    monkeypatch.setattr(BodyLimit, "__call__", watch)
    reply = http.post(path, content=b"{", headers={"X-Request-Id": "mine", "Origin": PAGE})
    assert reply.status_code == 503, reply.text  # 400 if somebody had looked at the body
    assert reply.json()["error"]["message"] == "the server is shutting down"
    assert reply.json().get("type") == ("error" if path == "/v1/messages" else None)
    assert reply.headers["X-Request-Id"] == "mine"
    assert reply.headers["Access-Control-Allow-Origin"] == PAGE
    record = json.loads(capfd.readouterr().err.splitlines()[-1])
    assert (record["path"], record["status"], record["request_id"]) == (path, 503, "mine")
    series = f'nano:http_requests_total{{handler="{path}",method="POST",model_name="tiny",'
    assert f'{series}status="503"}} 1.0' in http.get("/metrics").text
    assert let_in == ["/metrics"]


def test_only_calls_for_tokens_are_turned_away(http: TestClient, app: FastAPI) -> None:
    app.state.front_end.engine.drain()
    assert http.get("/v1/models").status_code == 200
    assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
    assert http.get("/v1/completions").status_code == 405
    assert http.post("/v1/completions/", json={}).status_code == 404


def test_the_prefix_of_a_proxy_does_not_open_the_door(app: FastAPI) -> None:
    door = Door(never, (routes.generation,), refuse)
    for path in ("/v1/completions", "/nano/v1/completions"):
        sent = asyncio.run(call(door, app, path, [b"{}"]))
        assert sent[0]["status"] == 429


def test_an_answer_waits_for_the_end_of_the_body_which_nobody_keeps(app: FastAPI) -> None:
    door = Door(BodyLimit(never, max_bytes=4), (routes.generation,), refuse)
    parts = [b"x" * 1000] * 3
    start, body = asyncio.run(call(door, app, "/v1/completions", parts))
    assert parts == []
    assert (b"retry-after", b"7") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "queue_full"


def test_of_a_stream_the_layers_around_the_routes_see_the_head_and_the_end(
    http: TestClient, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bytes]] = []
    inner = BodyLimit.__call__

    async def watch(self: BodyLimit, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched(message: Message) -> None:
            seen.append((message["type"], message.get("body", b"")))
            await send(message)

        await inner(self, scope, receive, watched)

    monkeypatch.setattr(BodyLimit, "__call__", watch)
    body = {"prompt": "p", "max_tokens": 20, "seed": 0, "stream": True}
    reply = http.post("/v1/completions", json=body)
    assert reply.text.endswith("data: [DONE]\n\n")
    assert reply.headers["X-Request-Id"]
    assert seen == [("http.response.start", b""), ("http.response.body", b"")]


async def never(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("it was let in")


async def call(door: Door, app: FastAPI, path: str, parts: list[bytes]) -> list[Any]:
    """What is sent to a caller whose body comes in `parts`, which are taken from the list."""
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "/nano", "app": app}
    sent: list[Message] = []

    async def receive() -> Message:
        assert not sent
        part = parts.pop()
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Message) -> None:
        sent.append(message)

    await door({**scope, "headers": []}, receive, send)
    return sent
