"""Asking a server twice, for a whole answer and for a stream, which must say the same."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.serve.server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
ROUTES = [(COMPLETIONS, {"prompt": "Hello"}), (CHAT, {"messages": HELLO})]


@dataclass
class Choice:
    text: str = ""
    pieces: list[str] = field(default_factory=list)  # of the stream, those that are not empty
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # in the route's shape, an entry per token
    ending: tuple[str, str | int | None] | None = None  # finish_reason, stop_reason


def post(server: Server, route: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = server.http.post(route, json={**body, **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def stream(server: Server, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks, the last of which has the usage."""
    wish = {"stream": True, "stream_options": {"include_usage": True}}
    reply = server.http.post(route, json={**body, **wish})
    assert reply.status_code == 200, reply.text
    *events, done = [e.removeprefix("data: ") for e in reply.text.split("\n\n") if e]
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def ask(
    server: Server, route: str, body: dict[str, Any], **fields: Any
) -> tuple[list[Choice], dict[str, Any]]:
    """The choices and the usage. Give a seed, or be greedy."""
    body = {**body, **fields, "return_token_ids": True}
    answer = post(server, route, body)
    whole = [_read(Choice(), choice) for choice in answer["choices"]]
    *chunks, last = stream(server, route, body)
    streamed = [Choice() for _ in whole]
    for chunk in chunks:
        for choice in chunk["choices"]:
            _read(streamed[choice["index"]], choice)
    for one, other in zip(whole, streamed):
        one.pieces = other.pieces
        assert other == one
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == answer["usage"][name]
    assert answer["usage"]["completion_tokens"] == sum(len(choice.token_ids) for choice in whole)
    return whole, answer["usage"]


def ask_one(server: Server, route: str, body: dict[str, Any], **fields: Any) -> Choice:
    (choice,), _ = ask(server, route, body, **fields)
    return choice


def _read(choice: Choice, part: dict[str, Any]) -> Choice:
    """Add a whole choice, or what a chunk has of it."""
    assert choice.ending is None, "nothing comes after the end"
    message = part.get("message") or part.get("delta") or {}
    text = part["text"] if "text" in part else message.get("content") or ""
    choice.text += text
    choice.pieces += [text] if text else []
    choice.token_ids += part.get("token_ids") or []
    logprobs = part["logprobs"] or {}
    if "tokens" in logprobs:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        choice.logprobs += zip(*(logprobs[name] for name in names))
    choice.logprobs += logprobs.get("content", ())
    if part["finish_reason"] is not None:
        choice.ending = (part["finish_reason"], part["stop_reason"])
    return choice
