"""What users of other engines reported about calls over HTTP: what they may hold, and who leaves.

Ids like B091 name the report. More of them are in test_app.py, test_bad_bodies.py, test_tokens.py,
test_faults.py (B097) and test_process.py (B101).
"""

import json
import socket
from typing import Any

import pytest

from tests.serve.both_ways import CHAT, COMPLETIONS, HELLO, post
from tests.serve.scrape import IDLE, scrape, wait_for
from tests.serve.server import Server
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE

ROUTES = (COMPLETIONS, CHAT)
GOOD: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "Once"}, CHAT: {"messages": HELLO}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "2"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(server: Server, *messages: Any, **fields: Any) -> dict[str, Any]:
    return post(server, CHAT, {"messages": messages, "max_tokens": 6, "temperature": 0, **fields})


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two answers are one in text and tokens."""
    texts = [answer["choices"][0]["message"] for answer in (one, other)]
    counts = [answer["usage"]["prompt_tokens"] for answer in (one, other)]
    return bool(texts[0] == texts[1] and counts[0] == counts[1])


def refused(server: Server, route: str, status: int = 400, **fields: Any) -> dict[str, Any]:
    """The error of a call that is turned away, the same whether it asked for a stream or not."""
    errors = []
    for is_streamed in (False, True):
        body = {**GOOD[route], "max_tokens": 2, "stream": is_streamed, **fields}
        content, headers = json.dumps(body), {"content-type": "application/json"}
        reply = server.http.post(route, content=content, headers=headers)
        assert reply.status_code == status, reply.text
        assert reply.headers["content-type"] == "application/json"
        assert int(reply.headers["content-length"]) == len(reply.content)
        errors.append(reply.json()["error"])
        assert set(errors[-1]) == {"message", "type", "param", "code"}
    assert errors[0] == errors[1]
    return dict(errors[0])


class TestMessages:
    def test_parts_of_text_are_the_text(self, chat_server: Server, server: Server) -> None:  # B091
        for served in (chat_server, server):
            for role in ("user", "system", "developer"):
                parts = [{"type": "text", "text": "Say hi"}]
                told = [chat(served, {"role": role, "content": c}) for c in ("Say hi", parts)]
                assert same(*told)

    @pytest.mark.parametrize("said", [{}, {"content": None}, {"content": ""}])
    def test_an_assistant_that_only_called_tools_needs_no_content(  # B091
        self, chat_server: Server, server: Server, said: dict[str, Any]
    ) -> None:
        """Whether the template knows of calls or not (then the model is told of them in text)."""
        called = {"role": "assistant", "tool_calls": [CALL], **said}
        result = {**RESULT, "content": [{"type": "text", "text": "2"}]}
        for served in (chat_server, server):
            assert same(chat(served, *HELLO, called, result), chat(served, *HELLO, called, RESULT))
        text = {"role": "assistant", "content": '{"name": "add", "arguments": {"x": 1}}'}
        assert same(chat(server, *HELLO, called), chat(server, *HELLO, text))

    def test_what_clients_copy_from_a_stream_is_taken_back(self, chat_server: Server) -> None:
        """The official client's helper adds fields of its own to a message."""  # B091
        messages: Any = [{"role": "user", "content": "Hi"}]
        with chat_server.client().chat.completions.stream(
            model="tiny", messages=messages, logit_bias={str(EOS_TOKEN_ID): 100}
        ) as stream:
            stream.until_done()
            message = stream.get_final_completion().choices[0].message.model_dump()
        assert "parsed" in message
        assert same(
            chat(chat_server, *messages, message),
            chat(chat_server, *messages, {"role": "assistant", "content": message["content"]}),
        )
        function = {**CALL["function"], "parsed_arguments": {"x": 1}}  # type: ignore[dict-item]
        theirs = {"role": "assistant", "tool_calls": [{**CALL, "index": 0, "function": function}]}
        plain = {"role": "assistant", "tool_calls": [CALL]}
        assert same(chat(chat_server, theirs, RESULT), chat(chat_server, plain, RESULT))

    @pytest.mark.parametrize(
        "content",
        [
            None,
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10**6}}],
            [{"type": "text", "text": "x"}, {"type": "input_audio", "input_audio": {}}],
            [{"type": "text", "text": None}],
            {"type": "text", "text": "x"},
        ],
        ids=["null", "image", "audio", "no-text", "no-list"],
    )
    def test_what_is_no_text_is_refused_in_few_words(self, server: Server, content: Any) -> None:
        error = refused(server, CHAT, messages=[{"role": "user", "content": content}])  # B091
        assert error["param"] == "messages"
        assert "content" in error["message"]
        assert len(error["message"]) < 300


class TestPrompts:
    @pytest.mark.parametrize(
        "prompt",
        [
            *([-1], [[-1]], [[1], [2, -1]], [VOCAB_SIZE], [2**32 - 1], [2**63], [2**64]),
            *([1.5], [1.0], [True], [None], [[[1]]], [[1], "a"], [1, [2]], [[1], []], {}),
        ],
        ids=repr,
    )
    def test_only_ids_of_tokens_are_tokens(self, server: Server, prompt: Any) -> None:  # B094
        assert refused(server, COMPLETIONS, prompt=prompt)["param"] == "prompt"

    def test_the_last_token_and_the_byte_nought_are_tokens_like_others(  # B094, B099
        self, server: Server
    ) -> None:
        for prompt, num_tokens in (([VOCAB_SIZE - 1], 1), ([[VOCAB_SIZE - 1, 0]], 2), ("a\0b", 3)):
            answer = post(server, COMPLETIONS, {"prompt": prompt, "max_tokens": 1})
            assert answer["usage"]["prompt_tokens"] == num_tokens


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"n": 0}, "n"),
            ({"max_tokens": -1}, "max_tokens"),
            ({"temperature": "hot"}, "temperature"),
            ({"logprobs": "yes"}, "logprobs"),
            ({"foo": 1}, "foo"),
            ({"foo": None}, "foo"),
        ],
    )
    @pytest.mark.parametrize("route", ROUTES)
    def test_a_bad_stream_is_refused_before_it_begins(  # B095, B099
        self, server: Server, route: str, fields: dict[str, Any], param: str
    ) -> None:
        error = refused(server, route, **fields)
        assert error["param"] == param
        assert param in error["message"]

    @pytest.mark.parametrize(
        ("route", "fields"),
        [
            (COMPLETIONS, {"best_of": 3}),
            (COMPLETIONS, {"best_of": 1, "n": 2}),
            (COMPLETIONS, {"suffix": "end"}),
            (CHAT, {"best_of": 2}),
            (CHAT, {"top_logprobs": 3}),
            (CHAT, {"top_logprobs": 3, "logprobs": False}),
            (CHAT, {"top_logprobs": 21, "logprobs": True}),
            (CHAT, {"modalities": ["text", "audio"]}),
            (CHAT, {"store": True}),
            (CHAT, {"tools": [TOOL]}),  # B105
            (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
            (CHAT, {"tool_choice": "required"}),
            (CHAT, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
            (CHAT, {"functions": [TOOL["function"]]}),
            (CHAT, {"response_format": {"type": "json_object"}}),  # B103
            (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
            (CHAT, {"structured_outputs": {"regex": "a+"}}),
            (CHAT, {"guided_json": {}}),
            (COMPLETIONS, {"response_format": {"type": "json_object"}}),
            (COMPLETIONS, {"guided_regex": "a+"}),
        ],
    )
    def test_a_field_that_would_change_the_answer_is_applied_or_refused_by_name(  # B104
        self, server: Server, route: str, fields: dict[str, Any]
    ) -> None:
        error = refused(server, route, **fields)
        assert error["param"] == next(iter(fields))
        assert error["param"] in error["message"]

    @pytest.mark.parametrize("route", ROUTES)
    def test_n_choices_come_from_both_routes(self, server: Server, route: str) -> None:  # B104
        answer = post(server, route, GOOD[route], n=3, max_tokens=2)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


class TestModels:
    def test_an_answer_bears_the_name_that_was_asked_for(self, chat_server: Server) -> None:  # B100
        listed = chat_server.http.get("/v1/models").json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "other"]
        for asked in ({"model": "tiny"}, {"model": "other"}, {"model": None}, {}):
            name = asked.get("model") or "tiny"
            assert chat_server.http.get(f"/v1/models/{name}").json()["id"] == name
            for route in ROUTES:
                body = {**GOOD[route], "max_tokens": 1, **asked}
                assert post(chat_server, route, body)["model"] == name
                events = chat_server.http.post(route, json={**body, "stream": True}).text
                assert events.count(f'"model":"{name}"') == events.count("data: {")

    @pytest.mark.parametrize("name", ["no-such", "", "TINY", "tiny ", "{folder}"])
    def test_any_other_name_is_not_found(self, server: Server, name: str) -> None:  # B100
        name = name.format(folder=server.process.args[4])  # type: ignore[index]
        for route in ROUTES:
            error = refused(server, route, 404, model=name)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert repr(name) in error["message"]


class TestLeaving:
    @pytest.mark.parametrize("is_streamed", [False, True])
    def test_callers_who_leave_take_all_their_choices_along_and_those_that_wait(  # B102
        self, server: Server, is_streamed: bool
    ) -> None:
        """Four run at once, each would take minutes, and each call brings four or more."""
        aborted, tokens = "request_success_total{finished_reason=abort}", "generation_tokens_total"
        wait_for(server.http, IDLE)
        before = scrape(server.http)
        bodies: list[tuple[str, dict[str, Any]]] = [
            (COMPLETIONS, {"prompt": ["Once", "Twice"], "n": 2}),
            (CHAT, {"messages": HELLO, "n": 4}),
        ]
        endless = {"max_tokens": 30_000, "ignore_eos": True, "stream": is_streamed}
        address = ("127.0.0.1", server.http.base_url.port or 0)
        callers = [socket.create_connection(address) for _ in bodies * 2]
        for caller, (route, body) in zip(callers, bodies * 2):
            content = json.dumps({**body, **endless}).encode()
            head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            caller.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        wait_for(server.http, {"num_requests_running": 4, "num_requests_waiting": 12})
        for caller in callers:
            caller.close()
        wait_for(server.http, IDLE)
        after = scrape(server.http)
        assert after[aborted] - before.get(aborted, 0) == 16
        assert after[tokens] - before[tokens] < 4 * 30_000
