"""What users of other engines reported about speculation over HTTP (ids like B012).

A real server. What it answers with drafts is compared with what it answers without, to the last
digit. The model is an "echo" (see tests/engine/test_speculation_reports.py), so that guesses from
text are often right.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nano.layers.native_kernels import NativeKernels
from tests.engine.test_speculation_reports import PRINTABLE, draft_model, make_echo, ngram
from tests.serve.server import Server

pytestmark = pytest.mark.skipif(
    not NativeKernels.is_available(), reason="bits are promised on our own kernels"
)

OFF = {"enabled": False}
TEXT = "one two three one two three one two"
MESSAGES = [{"role": "user", "content": TEXT}]
GREEDY = {"temperature": 0, "seed": 4, "max_tokens": 40, "return_token_ids": True}
GREEDY |= {"ignore_eos": True}
SAMPLED = GREEDY | {"temperature": 0.9, "allowed_token_ids": [*PRINTABLE]}
ROUTES = [
    ("/v1/completions", {"prompt": TEXT, "logprobs": 5}),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = make_echo(tmp_path_factory.mktemp("echo"))
    config = {"proposers": [ngram(), draft_model("same", folder)], "draft_length": "static"}
    server = Server(folder, "--speculative-config", json.dumps(config))
    yield server
    server.stop()


def post(server: Server, route: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    reply = server.http.post(route, json={**body, **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def told(reply: dict[str, Any]) -> dict[str, Any]:
    """All that a reply says of the text, and not of how it was computed."""
    choices = [{k: v for k, v in c.items() if k != "speculative"} for c in reply["choices"]]
    return {
        "choices": choices,
        "usage": {k: v for k, v in reply["usage"].items() if not k.endswith("_details")},
    }


def num_accepted(reply: dict[str, Any]) -> int:
    proposers = reply["choices"][0]["speculative"]["proposers"]
    return sum(stats["num_accepted_tokens"] for stats in proposers.values())


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    if "message" in choice:
        return [entry["logprob"] for entry in choice["logprobs"]["content"]]
    token_logprobs: list[float] = choice["logprobs"]["token_logprobs"]
    return token_logprobs


@pytest.mark.parametrize("method", ["ngram", "same"])
@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_logprobs_with_drafts_are_those_without(
    server: Server, route: str, body: dict[str, Any], method: str
) -> None:  # B012
    off = post(server, route, body | GREEDY, speculative=OFF)
    on = post(server, route, body | GREEDY, speculative={"method": method})
    assert told(on) == told(off)
    assert num_accepted(on) > 10
    (choice,) = on["choices"]
    logprobs = logprobs_of(choice)
    assert len(logprobs) == on["usage"]["completion_tokens"] == 40
    assert all(logprob < 0.0 for logprob in logprobs)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("method", ["same", "prediction"])
@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_stop_string_in_accepted_drafts_ends_answer_stream_and_usage(
    server: Server, route: str, body: dict[str, Any], method: str, shown: bool
) -> None:  # B004, B002
    def text_of(choice: dict[str, Any], part: str) -> str:
        return str(choice[part].get("content") or "" if part in choice else choice["text"])

    body = body | SAMPLED
    whole = text_of(post(server, route, body, speculative=OFF)["choices"][0], "message")
    stop = whole[12:19]
    assert whole.index(stop) == 12
    body |= {"stop": stop, "include_stop_str_in_output": shown}
    wish: dict[str, Any] = {"speculative": {"method": method}}
    if method == "prediction":
        wish["prediction"] = {"type": "content", "content": whole}
    off = post(server, route, body, speculative=OFF)
    on = post(server, route, body | wish)
    assert told(on) == told(off)
    (choice,) = on["choices"]
    end = whole.index(stop) + len(stop)
    text = text_of(choice, "message")
    assert text == whole[: end if shown else end - len(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert on["usage"]["completion_tokens"] == len(choice["token_ids"]) == end
    assert num_accepted(on) > 5

    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    reply = server.http.post(route, json=body | wish | streamed)
    *events, done = [e.removeprefix("data: ") for e in reply.text.split("\n\n") if e]
    assert done == "[DONE]"
    *chunks, last = map(json.loads, events)
    assert "".join(text_of(chunk["choices"][0], "delta") for chunk in chunks) == text
    assert last["usage"]["completion_tokens"] == end


@pytest.mark.parametrize(
    "fields",
    [
        {"min_p": 0.2},
        {"logit_bias": {"101": -100, "32": 3}},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"bad_words": ["e", "on"]},
        {"min_tokens": 20, "stop_token_ids": [*range(65, 97)]},
        {"allowed_token_ids": [*range(97, 123)]},
        {"n": 3, "top_p": 0.8, "top_k": 20},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("method", ["ngram", "same"])
def test_no_parameter_is_refused_or_forgotten_because_of_drafts(
    server: Server, method: str, fields: dict[str, Any]
) -> None:
    body = {"prompt": TEXT, **SAMPLED, "logprobs": 2, **fields}
    on = post(server, "/v1/completions", body, speculative={"method": method})
    off = post(server, "/v1/completions", body, speculative=OFF)
    assert told(on) == told(off)
    without = {k: v for k, v in body.items() if k != next(iter(fields))}
    assert told(post(server, "/v1/completions", without, speculative=OFF)) != told(off)
    for choice in on["choices"]:
        assert sum(p["num_draft_tokens"] for p in choice["speculative"]["proposers"].values()) > 0


@pytest.mark.parametrize("wish", [OFF, {"method": "ngram"}, {"method": "same", "num_tokens": 4}])
def test_calls_without_a_seed_do_not_repeat_one_another(
    server: Server, wish: dict[str, Any]
) -> None:  # B017
    def call(_: int) -> str:
        body = {"prompt": "Once upon a", "temperature": 1.0, "max_tokens": 12}
        reply = post(server, "/v1/completions", body, speculative=wish, return_token_ids=True)
        return str(reply["choices"][0]["token_ids"])

    one_by_one = {*map(call, range(20))}
    with ThreadPoolExecutor(20) as pool:
        at_once = {*pool.map(call, range(20))}
    assert len(one_by_one) >= 15
    assert len(at_once) >= 15
    assert len(one_by_one | at_once) >= 30


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("wish", [OFF, {"method": "ngram"}, {"method": "same"}])
@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    ],
    ids=lambda given: given["type"],
)
def test_a_grammar_is_refused_rather_than_answered_in_free_text(
    server: Server, response_format: dict[str, Any], wish: dict[str, Any]
) -> None:  # B025
    body = {"messages": MESSAGES, "response_format": response_format, "speculative": wish}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "response_format"
