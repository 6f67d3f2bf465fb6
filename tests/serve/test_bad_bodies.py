"""Bodies that no client should send: each gets a 4xx in its API's shape; nobody else notices."""

import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nano.serve.http.errors import Refusal
from nano.serve.http.json_route import MAX_DEPTH, parse_json
from tests.serve.server import Server

JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "Hello"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 1, "stop": ["x"], "logit_bias": {"65": 1}},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1, "seed": 1, "logprobs": True},
}
NUM_FUZZED = 100  # bodies for each route


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + closing * depth).encode()


UNREADABLE = {
    "nothing": b"",
    "a part": b'{"prompt": "x"',
    "a part of a string": b'{"prompt": "x',
    "two": b"{} {}",
    "a comment": b'{"prompt": "x"} // yes',
    "a comma too many": b'{"prompt": "x",}',
    "single quotes": b"{'prompt': 'x'}",
    "a control character": b'{"prompt": "a\x00b"}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "a byte that is not UTF-8": b'{"prompt": "\xff"}',
    "an overlong form": b'{"prompt": "\xc0\x80"}',
    "a surrogate as bytes": b'{"prompt": "\xed\xa0\x80"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "UTF-32": '{"prompt": "x"}'.encode("utf-32"),
    "lists without end": b"[" * 1_000_000,
    "objects without end": b'{"a":' * 200_000,
    "lists too deep": b'{"prompt": ' + nested(MAX_DEPTH) + b"}",
    "lists far too deep": b'{"prompt": ' + nested(5000) + b"}",
    "objects far too deep": nested(5000, '{"a":', "}").replace(b":}", b":0}"),
    "half of a character": b'{"prompt": "\\ud800"}',
    "the other half": b'{"prompt": "\\udc00\\ud800"}',
    "half of a character as a key": b'{"\\udfff": 1}',
    "half of a character deep down": b'{"prompt": [{"a": ["\\ud800"]}]}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "-Infinity": b'{"prompt": "x", "logit_bias": {"65": -Infinity}}',
    "a float past all": b'{"prompt": "x", "temperature": 1e400}',
    "an integer past all": b'{"prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
    "a long integer": b'{"prompt": "x", "temperature": 1' + b"0" * 400 + b"}",
    "a repeated key": b'{"prompt": "x", "prompt": "y"}',
    "a repeated key deep down": b'{"prompt": "x", "logit_bias": {"65": 1, "65": 2}}',
    "a list": b"[]",
    "a text": b'"x"',
    "null": b"null",
    "a number": b"5",
    "true": b"true",
}


@pytest.fixture(scope="module")
def routes(short_server: Server) -> list[str]:
    """Every route that takes a body."""
    paths = short_server.http.get("/openapi.json").json()["paths"]
    found = [path for path, methods in paths.items() if "requestBody" in methods.get("post", {})]
    assert set(found) >= set(GOOD)
    return found


@pytest.fixture(autouse=True)
def a_server_that_goes_on(short_server: Server) -> Iterator[None]:
    yield
    for route, body in GOOD.items():
        assert short_server.http.post(route, json=body).status_code == 200


def assert_is_refusal(reply: httpx.Response, *statuses: int) -> str:
    assert reply.status_code in (statuses or range(400, 500)), reply.text[:1000]
    message = reply.json()["error"]["message"]
    assert isinstance(message, str)
    assert len(reply.content) < 10_000
    return message


@pytest.mark.parametrize("what", UNREADABLE)
def test_a_body_that_cannot_be_read(short_server: Server, routes: list[str], what: str) -> None:
    for route in routes:
        reply = short_server.http.post(route, content=UNREADABLE[what], headers=JSON)
        assert_is_refusal(reply, 400)


def test_every_route_reads_its_body_strictly(short_server: Server, routes: list[str]) -> None:
    for route in routes:
        reply = short_server.http.post(route, content=b'{"x": 1, "x": 2}', headers=JSON)
        assert "'x' comes twice" in assert_is_refusal(reply, 400)


def test_a_refusal_names_the_field(short_server: Server) -> None:
    for body, field in (
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "x", "stop": ["a", "\\ud800"]}', "stop"),
        (b'{"prompt": "x", "top_p": NaN}', "top_p"),
        (b'{"prompt": "x", "logit_bias": {"65": 1e999}}', "logit_bias"),
        # Of no meaning to us, and refused all the same.
        (b'{"prompt": "x", "metadata": {"a": "\\ud800"}}', "metadata"),
        (b'{"prompt": "x", "unknown": [-Infinity]}', "unknown"),
    ):
        reply = short_server.http.post("/v1/completions", content=body, headers=JSON)
        assert field in assert_is_refusal(reply, 400)
        assert reply.json()["error"]["param"] == field


@pytest.mark.parametrize(
    "declared",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json"],
)
def test_a_body_that_is_not_declared_as_json(
    short_server: Server, routes: list[str], declared: str | None
) -> None:
    headers = {} if declared is None else {"Content-Type": declared}
    for route in routes:
        body = json.dumps(GOOD.get(route, {})).encode()
        message = assert_is_refusal(
            short_server.http.post(route, content=body, headers=headers), 400
        )
        assert "Content-Type: application/json" in message


def test_a_body_may_name_its_character_set(short_server: Server) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8", "Content-Encoding": "identity"}
    body = json.dumps({**GOOD["/v1/completions"], "prompt": "é😀"}, ensure_ascii=False).encode()
    for sent in (body, body.replace("😀".encode(), b"\\ud83d\\ude00")):
        reply = short_server.http.post("/v1/completions", content=sent, headers=headers)
        assert reply.status_code == 200
        assert reply.json()["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, identity", "nonsense"])
def test_a_compressed_body(short_server: Server, routes: list[str], encoding: str) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    for route in routes:
        headers = {**JSON, "Content-Encoding": encoding}
        message = assert_is_refusal(
            short_server.http.post(route, content=body, headers=headers), 415
        )
        assert "Content-Encoding" in message


def test_fifty_megabytes(short_server: Server, routes: list[str]) -> None:
    body = b'{"prompt": "' + b"x" * 50_000_000 + b'"}'
    for route in routes[:2]:
        message = assert_is_refusal(short_server.http.post(route, content=body, headers=JSON), 413)
        assert "--max-body-bytes" in message


@pytest.mark.parametrize("route", GOOD)
def test_bodies_that_were_damaged_at_random(short_server: Server, route: str) -> None:
    """A good body after a few random edits is good, or a 4xx."""
    rng = random.Random(f"bad bodies for {route}")
    good = json.dumps(GOOD[route]).encode()
    num_refused = 0
    for _ in range(NUM_FUZZED):
        reply = short_server.http.post(route, content=damaged(good, rng), headers=JSON)
        if reply.status_code != 200:
            assert_is_refusal(reply)
            num_refused += 1
    assert num_refused > NUM_FUZZED // 2


PIECES = (
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud800", b"\x00", b"\xff", b" "),
    *(b"null", b"true", b"NaN", b"-1", b"1e999", b"9" * 30, b"0.5", b"[[]]", b'{"a":1}', b'"x"'),
    *(b"prompt", b"messages", b"stream", b"n", b"max_tokens", b"top_p", b"\xf0\x9f\x98\x80"),
)


def damaged(body: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 4)):
        begin, end = sorted(rng.randrange(len(body) + 1) for _ in range(2))
        end = min(end, begin + rng.choice((0, 0, 1, 4, 100)))
        match rng.randrange(6):
            case 0:
                body = body[:begin]
            case 1:
                body = body[:begin] + bytes([rng.randrange(256)]) + body[begin + 1 :]
            case 2:
                body = body[:begin] + body[begin:end] * 2 + body[end:]
            case _:
                body = body[:begin] + rng.choice(PIECES) + body[end:]
    return body


class TestParser:
    def test_it_agrees_with_pythons_on_what_everybody_can_read(self) -> None:
        for text in ('{"a": [1, -2.5e3, "é\\ud83d\\ude00\\u0000", null, {"b": {}}]}', "[]", "7"):
            assert parse_json(text.encode()) == json.loads(text)

    @pytest.mark.parametrize(
        "text", ['["\\ud800"]', '{"\\ud800": 1}', "NaN", "[-Infinity]", '{"a": {"b": [1e400]}}']
    )
    def test_what_python_reads_and_json_is_not_is_refused(self, text: str) -> None:
        json.loads(text)
        with pytest.raises(Refusal, match="must not hold") as refusal:
            parse_json(text.encode())
        assert refusal.value.status_code == 400

    def test_depth_counts_lists_within_each_other_not_side_by_side(self) -> None:
        flat = [[["[{"] * 300] * 2, {"a": {}}]
        assert parse_json(json.dumps(flat).encode()) == flat
        assert parse_json(nested(MAX_DEPTH))
        with pytest.raises(Refusal, match=str(MAX_DEPTH)):
            parse_json(nested(MAX_DEPTH + 1))
