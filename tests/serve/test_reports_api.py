"""What users of other engines reported about answers over HTTP: their shape, streams and limits.

Ids like B083 name the report. More of them are in test_app.py; what callers may send is in
test_reports_api_calls.py.
"""

import asyncio
import json
import socket
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from nano.serve.http.server import listening
from nano.serve.options import ServerOptions
from tests.engine.naive import NaiveEngine
from tests.serve.both_ways import CHAT, COMPLETIONS, HELLO, post
from tests.serve.server import Server
from tests.tiny import EOS_TOKEN_ID

# Four choices each, drawn, so that they differ.
FOUR = [
    (COMPLETIONS, {"prompt": ["Once", "Twice"], "n": 2}),
    (CHAT, {"messages": HELLO, "n": 4}),
]
SAMPLED = {"temperature": 1, "seed": 3, "max_tokens": 8}
ENDED = {"logit_bias": {str(EOS_TOKEN_ID): 100}}  # at its first token
LINE_ENDS = "a\x85b\u2028c\u2029d\re"


def stream(server: Server, route: str, body: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which is server-sent events as OpenAI writes them."""
    reply = server.http.post(route, json={**body, **fields, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def counts(answer: dict[str, Any]) -> dict[str, int]:
    """Without what depends on earlier calls."""
    return {name: n for name, n in answer["usage"].items() if name.endswith("_tokens")}


def text_of(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta")
    return str(choice["text"] if part is None else part.get("content", ""))


class TestStreams:
    @pytest.mark.parametrize(
        ("options", "is_told"),
        [
            ({}, False),
            ({"stream_options": None}, False),
            ({"stream_options": {}}, False),
            ({"stream_options": {"include_usage": False}}, False),
            ({"stream_options": {"include_usage": True}}, True),
        ],
    )
    @pytest.mark.parametrize(("route", "body"), FOUR)
    def test_usage_comes_once_and_last_and_only_if_asked_for(  # B083
        self,
        server: Server,
        route: str,
        body: dict[str, Any],
        options: dict[str, Any],
        is_told: bool,
    ) -> None:
        chunks = stream(server, route, body | SAMPLED, **options)
        if is_told:
            last = chunks.pop()
            assert last["choices"] == []
            assert counts(last) == counts(post(server, route, body | SAMPLED))
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        assert all(chunk.get("usage") is None for chunk in chunks)

    @pytest.mark.parametrize("ending", [{}, ENDED], ids=["of-some-tokens", "of-none"])
    @pytest.mark.parametrize(("route", "body"), FOUR)
    def test_every_choice_begins_and_ends_once_in_one_answer(  # B084
        self, server: Server, route: str, body: dict[str, Any], ending: dict[str, Any]
    ) -> None:
        chunks = stream(server, route, body | SAMPLED | ending)
        whole = post(server, route, body | SAMPLED | ending)
        head = {tuple(chunk[name] for name in ("id", "created", "model")) for chunk in chunks}
        assert len(head) == 1
        name = {COMPLETIONS: "text_completion", CHAT: "chat.completion.chunk"}[route]
        assert {chunk["object"] for chunk in chunks} == {name}
        parts = [chunk["choices"][0] for chunk in chunks]
        assert {part["index"] for part in parts} == {0, 1, 2, 3}
        for index, choice in enumerate(whole["choices"]):
            mine = [part for part in parts if part["index"] == index]
            reasons = [part["finish_reason"] for part in mine]
            assert reasons == [None] * (len(mine) - 1) + [choice["finish_reason"]]
            assert choice["finish_reason"] == ("stop" if ending else "length")
            assert "".join(map(text_of, mine)) == text_of(choice)
            assert (text_of(choice) == "") == bool(ending)
            if route == CHAT:
                roles = [part["delta"].get("role") for part in mine]
                assert roles == ["assistant"] + [None] * (len(mine) - 1)
                assert mine[-1]["delta"] == {}

    def test_no_text_breaks_a_line(self, server: Server) -> None:  # B084
        """To Unicode, U+0085, U+2028 and U+2029 end lines; httpx and others split there."""
        body = {"prompt": LINE_ENDS, "echo": True, "max_tokens": 1, "stream": True}
        with server.http.stream("POST", COMPLETIONS, json=body) as reply:
            lines = [line for line in reply.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert "".join(text_of(c["choices"][0]) for c in chunks).startswith(LINE_ENDS)

    def test_a_chunk_does_not_wait_until_the_caller_has_acknowledged_the_last(self) -> None:
        """Nagle's algorithm would hold it for 40 ms, and the body of a plain answer too."""

        async def is_nodelay(listener: socket.socket) -> int:
            accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.Future()
            server = await asyncio.start_server(
                lambda _, writer: accepted.set_result(writer), sock=listener
            )
            async with server:
                _, caller = await asyncio.open_connection(*listener.getsockname())
                writer = await accepted
                option = (socket.IPPROTO_TCP, socket.TCP_NODELAY)
                nodelay: int = writer.get_extra_info("socket").getsockopt(*option)
                for end in (caller, writer):
                    end.close()
            return nodelay

        with listening(ServerOptions(port=0)) as listener:
            assert asyncio.run(is_nodelay(listener))


# Tokens that show no text, in part or not at all.
ENDS: dict[str, dict[str, Any]] = {
    "length": {},
    "end-of-sequence": {"logit_bias": {str(EOS_TOKEN_ID): 7}, "max_tokens": 60},
    "stop-string": {"stop": ["ab", "ba"], "allowed_token_ids": [97, 98], "max_tokens": 60},
    "half-a-character": {"allowed_token_ids": [*"🫠".encode()[:3]]},
}


class TestLogprobs:
    @pytest.mark.parametrize("end", ENDS)
    def test_every_token_of_a_completion_has_its_entry(self, server: Server, end: str) -> None:
        """Whatever ends it, whole and streamed, and each choice has offsets of its own."""  # B085
        body = {"prompt": ["Once", "Twice"], "n": 2, "logprobs": 0, **SAMPLED, **ENDS[end]}
        whole = post(server, COMPLETIONS, body)
        parts = [chunk["choices"][0] for chunk in stream(server, COMPLETIONS, body)]
        num_entries = 0
        for choice in whole["choices"]:
            logprobs = choice["logprobs"]
            mine = [p["logprobs"] for p in parts if p["index"] == choice["index"] and p["logprobs"]]
            for name, entries in logprobs.items():
                assert list(chain.from_iterable(part[name] for part in mine)) == entries
                assert len(entries) == len(logprobs["tokens"])
            assert all(type(logprob) is float for logprob in logprobs["token_logprobs"])
            offsets = logprobs["text_offset"]  # B087
            assert offsets[0] == 0
            assert offsets == sorted(offsets)
            num_entries += len(offsets)
        assert num_entries == whole["usage"]["completion_tokens"]
        reason = "stop" if end in ("end-of-sequence", "stop-string") else "length"
        assert {choice["finish_reason"] for choice in whole["choices"]} == {reason}

    @pytest.mark.parametrize("num_top", [None, 0, 3])
    @pytest.mark.parametrize("end", ENDS)
    def test_every_token_of_a_chat_has_its_entry(  # B085
        self, server: Server, end: str, num_top: int | None
    ) -> None:
        body = {"messages": HELLO, "n": 2, "logprobs": True, **SAMPLED, **ENDS[end]}
        body |= {"top_logprobs": num_top}
        whole = post(server, CHAT, body)
        parts = [chunk["choices"][0] for chunk in stream(server, CHAT, body)]
        num_entries = 0
        for choice in whole["choices"]:
            entries = choice["logprobs"]["content"]
            mine = [p["logprobs"] for p in parts if p["index"] == choice["index"] and p["logprobs"]]
            assert list(chain.from_iterable(part["content"] for part in mine)) == entries
            for entry in entries:
                assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
                assert len(entry["top_logprobs"]) == (num_top or 0)
            num_entries += len(entries)
        assert num_entries == whole["usage"]["completion_tokens"]

    @pytest.mark.parametrize("is_streamed", [False, True])
    @pytest.mark.parametrize("max_tokens", [0, 1])
    def test_prompts_are_scored_as_hugging_face_does(  # B088
        self, server: Server, checkpoint: Path, max_tokens: int, is_streamed: bool
    ) -> None:
        prompts = ["The cat sat on the mat", "é 🫠"]
        reference = NaiveEngine(checkpoint)
        body: dict[str, Any] = {
            "echo": True,
            "logprobs": 1,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        for given in (prompts, [[*prompt.encode()] for prompt in prompts]):
            body |= {"prompt": given}
            if is_streamed:
                parts = [chunk["choices"][0] for chunk in stream(server, COMPLETIONS, body)]
            else:
                parts = post(server, COMPLETIONS, body)["choices"]
            for index, prompt in enumerate(prompts):
                mine = [part for part in parts if part["index"] == index]
                scored = [part["logprobs"]["token_logprobs"] for part in mine if part["logprobs"]]
                first, *found = chain.from_iterable(scored)
                token_ids = [*prompt.encode()]
                assert first is None
                assert len(found) == len(token_ids) - 1 + max_tokens
                theirs = reference.logits(token_ids).log_softmax(-1)
                expected = [float(theirs[i, t]) for i, t in enumerate(token_ids[1:])]
                if max_tokens:
                    expected.append(float(theirs[-1].max()))
                assert found == pytest.approx(expected, abs=1e-3)
                text = "".join(map(text_of, mine))
                assert text == prompt if max_tokens == 0 else text.startswith(prompt)


class TestLimits:
    """`short_server` has a context of 64 tokens, and a template that takes 19."""

    @pytest.mark.parametrize(
        ("route", "fill", "num_template_tokens"),
        [
            (COMPLETIONS, lambda n: {"prompt": "x" * n}, 0),
            (COMPLETIONS, lambda n: {"prompt": [120] * n}, 0),
            (CHAT, lambda n: {"messages": [{"role": "user", "content": "x" * n}]}, 19),
        ],
    )
    def test_an_answer_ends_with_the_context_and_a_prompt_must_leave_room_for_a_token(  # B089
        self, short_server: Server, route: str, fill: Any, num_template_tokens: int
    ) -> None:
        for num_tokens in (50, 62, 63):
            body = fill(num_tokens - num_template_tokens)
            answer = post(short_server, route, body, max_tokens=100, ignore_eos=True)
            assert counts(answer)["prompt_tokens"] == num_tokens
            assert counts(answer)["total_tokens"] == 64
            assert answer["choices"][0]["finish_reason"] == "length"
        for num_tokens in (64, 65):
            body = fill(num_tokens - num_template_tokens)
            for fields in ({}, {"stream": True}, {"max_tokens": 1}):
                reply = short_server.http.post(route, json={**body, **fields})
                assert reply.status_code == 400
                error = reply.json()["error"]
                assert error["code"] == "context_length_exceeded"
                assert f"{num_tokens} tokens long; at most 63 fit" in error["message"]

    @pytest.mark.parametrize(
        ("limits", "num_tokens"),
        [
            ({"max_completion_tokens": 5}, 5),
            ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
            ({"max_completion_tokens": 9, "max_tokens": 5}, 9),
            ({"max_completion_tokens": 5, "max_tokens": None}, 5),
            ({"max_completion_tokens": None, "max_tokens": 5}, 5),
            ({"max_completion_tokens": None}, 64 - 19 - 5),
            ({}, 64 - 19 - 5),
        ],
    )
    def test_the_newer_name_of_max_tokens_wins_and_null_is_no_limit(  # B089
        self, short_server: Server, limits: dict[str, Any], num_tokens: int
    ) -> None:
        answer = post(short_server, CHAT, {"messages": HELLO, "ignore_eos": True, **limits})
        assert answer["usage"]["completion_tokens"] == num_tokens
