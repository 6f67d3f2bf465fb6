import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import MessageCountTokensParams, message_create_params
from openai import OpenAI

from nano.serve.messages.body import CountTokensBody, MessagesBody
from tests.serve.server import Server

MODEL = "tiny"
USER = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def send(client: Anthropic, *messages: Any, extra: Any = None, **params: Any) -> Any:
    """The client has no arguments for what its own models no longer take."""
    body = {"temperature": 0, **(extra or {})}
    params = {"model": MODEL, "max_tokens": 8, **params}
    return client.messages.create(**params, messages=messages or [USER], extra_body=body)


def chat(client: OpenAI, *messages: Any, **params: Any) -> Any:
    body = {"model": MODEL, "temperature": 0, "max_tokens": 8, **params}
    return client.chat.completions.create(**body, messages=messages or [USER])


def post(server: Server, **body: Any) -> httpx.Response:
    body = {"max_tokens": 8, "messages": [USER], **body}
    return server.http.post("/v1/messages", json=body)


def refusal(server: Server, **body: Any) -> str:
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    reply = answer.json()
    assert reply["type"] == "error"
    assert reply["error"]["type"] == "invalid_request_error"
    return str(reply["error"]["message"])


class TestCreate:
    def test_a_message_is_answered_as_a_chat_is(self, claude: Anthropic, client: OpenAI) -> None:
        message, expected = send(claude), chat(client)
        assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
        (block,) = message.content
        assert (block.type, block.text) == ("text", expected.choices[0].message.content)
        assert message.system_fingerprint == expected.system_fingerprint
        usage = message.usage
        num_input_tokens = usage.input_tokens + usage.cache_read_input_tokens
        assert num_input_tokens == expected.usage.prompt_tokens
        assert usage.output_tokens == expected.usage.completion_tokens

    def test_system_and_blocks_are_messages(self, claude: Anthropic, client: OpenAI) -> None:
        expected = chat(client, {"role": "system", "content": "Be brief."}, USER)
        mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        blocks = [{"type": "text", "text": "Hello", **mark}]
        for system in ("Be brief.", [{"type": "text", "text": "Be brief.", **mark}]):
            message = send(claude, {"role": "user", "content": blocks}, system=system)
            assert message.content[0].text == expected.choices[0].message.content

    def test_messages_of_one_side_in_a_row_are_one(self, claude: Anthropic, client: OpenAI) -> None:
        message = send(claude, USER, {"role": "user", "content": "there"})
        expected = chat(client, {"role": "user", "content": "Hello\nthere"})
        assert message.content[0].text == expected.choices[0].message.content

    def test_an_answer_goes_on_where_the_assistant_stopped(
        self, claude: Anthropic, client: OpenAI
    ) -> None:
        begun = {"role": "assistant", "content": "I would"}
        message = send(claude, USER, begun)
        template = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nI would"
        expected = client.completions.create(
            model=MODEL, prompt=template, temperature=0, max_tokens=8
        )
        assert message.content[0].text == expected.choices[0].text

    def test_an_answer_that_is_cut(self, claude: Anthropic) -> None:
        message = send(claude, max_tokens=2)
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
        assert message.usage.output_tokens == 2

    def test_an_answer_that_ends_by_itself(self, claude: Anthropic) -> None:
        message = send(claude, max_tokens=20_000, extra={"temperature": 1})
        assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)

    def test_a_stop_sequence_ends_the_text_before_it_and_is_told(self, claude: Anthropic) -> None:
        text = send(claude).content[0].text
        message = send(claude, stop_sequences=["never", text[1]])
        assert message.content[0].text == text[0]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[1])

    def test_sampling_parameters_are_applied(self, claude: Anthropic) -> None:
        greedy, drawn = send(claude), send(claude, extra={"temperature": 1})
        again = send(claude, extra={"temperature": 1, "seed": drawn.seed})
        assert again.content == drawn.content != greedy.content
        for only_the_best in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            message = send(claude, extra={"temperature": 1, **only_the_best})
            assert message.content == greedy.content

    def test_what_the_cache_held_is_counted_apart(self, claude: Anthropic) -> None:
        story = {"role": "user", "content": "A longer story. " * 9}
        first, second = send(claude, story).usage, send(claude, story).usage
        assert first.cache_read_input_tokens == 0
        assert second.cache_read_input_tokens > 50
        assert second.input_tokens == first.input_tokens - second.cache_read_input_tokens
        salted = send(claude, story, extra={"cache_salt": "mine"}).usage
        assert salted.cache_read_input_tokens == 0

    def test_neutral_fields_change_nothing(self, claude: Anthropic) -> None:
        message = send(
            claude,
            metadata={"user_id": "me"},
            service_tier="auto",
            thinking={"type": "disabled"},
            tools=[],
            tool_choice={"type": "auto"},
            cache_control={"type": "ephemeral"},
        )
        assert message.content == send(claude).content


class TestStream:
    @pytest.mark.parametrize("params", [{"max_tokens": 8}, {"max_tokens": 20_000}])
    def test_events_come_in_order_and_add_up_to_the_whole(
        self, server: Server, params: Any
    ) -> None:
        params = {**params, "temperature": 1, "seed": 7}
        whole = post(server, **params).json()
        lines = post(server, **params, stream=True).text.split("\n\n")
        assert lines.pop() == ""
        events = []
        for line in lines:
            name, data = line.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == "event: " + events[-1]["type"]
        kinds = [event["type"] for event in events]
        assert kinds[:3] == ["message_start", "content_block_start", "ping"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[3:-3]) == {"content_block_delta"}
        start = events[0]["message"]
        assert (start["content"], start["stop_reason"]) == ([], None)
        assert start["usage"]["output_tokens"] == 0
        deltas = [event["delta"] for event in events[3:-3]]
        assert {delta["type"] for delta in deltas} == {"text_delta"}
        assert "".join(delta["text"] for delta in deltas) == whole["content"][0]["text"]
        end = events[-2]
        assert end["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
        ended, begun = end["usage"], start["usage"]
        assert ended["input_tokens"] + ended["cache_read_input_tokens"] == begun["input_tokens"]

    def test_the_clients_own_helper_follows_it(self, claude: Anthropic) -> None:
        whole = send(claude)
        params: Any = {"model": MODEL, "max_tokens": 8, "messages": [USER]}
        with claude.messages.stream(**params, extra_body={"temperature": 0}) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert text == whole.content[0].text == message.content[0].text
        assert message.stop_reason == whole.stop_reason
        assert message.usage.output_tokens == whole.usage.output_tokens


class TestCountTokens:
    def test_the_count_is_the_prompts(self, claude: Anthropic) -> None:
        count = claude.messages.count_tokens(model=MODEL, messages=[USER], system="Be brief.")
        usage = send(claude, system="Be brief.").usage
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens

    def test_what_would_not_fit_is_counted_too(self, claude: Anthropic) -> None:
        long: Any = {"role": "user", "content": "x" * 40_000}
        assert claude.messages.count_tokens(model=MODEL, messages=[long]).input_tokens > 40_000

    def test_generation_has_no_say_in_it(self, server: Server) -> None:
        body = {"messages": [USER], "max_tokens": 5}
        answer = server.http.post("/v1/messages/count_tokens", json=body)
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert "unknown parameter 'max_tokens'" in answer.json()["error"]["message"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("tools", [{"name": "add", "input_schema": {}}], "tools are not supported"),
            ("tool_choice", {"type": "any"}, "tools are not supported"),
            ("thinking", {"type": "enabled", "budget_tokens": 1024}, "thinking is not set apart"),
            ("container", "c", "no containers"),
            ("max_tokens", 0, "[1, "),
            ("max_tokens", None, "max_tokens"),
            ("temperature", 1.5, "[0, 1], got 1.5"),
            ("top_p", 0, "top_p"),
            ("top_k", -5, "-5"),
            ("stop_sequences", [""], "empty"),
            ("stop_sequences", "x", "list"),
            ("system", 5, "a string or a list"),
            ("metadata", {"name": "me"}, "metadata.name"),
            ("service_tier", "fast", "'standard_only'"),
            ("max_completion_tokens", 5, "unknown parameter"),
            ("n", 2, "unknown parameter"),
        ],
    )
    def test_what_is_wrong_is_named_in_anthropics_shape(
        self, server: Server, field: str, value: Any, words: str
    ) -> None:
        message = refusal(server, **{field: value})
        assert field in message
        assert words in message

    @pytest.mark.parametrize(
        ("messages", "words"),
        [
            ([], "messages"),
            ([5], "messages.0"),
            ([{"role": "robot", "content": "Hello"}], "'assistant'"),
            ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "'image'"),
            ([{"role": "assistant", "content": [{"type": "tool_use"}]}], "'tool_use'"),
            ([{"role": "user", "content": "x" * 40_000}], "40"),
        ],
    )
    def test_bad_messages(self, server: Server, messages: Any, words: str) -> None:
        assert words in refusal(server, messages=messages)

    def test_a_body_that_is_no_json(self, server: Server) -> None:
        answer = server.http.post(
            "/v1/messages", content=b"{", headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"

    def test_another_model_is_not_found(self, server: Server) -> None:
        answer = post(server, model="claude")
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "not_found_error"

    def test_other_routes_keep_openais_shape(self, server: Server) -> None:
        for path in ("/v1/messages_of_another_kind", "/v1/completions"):
            assert "param" in server.http.post(path, json={}).json()["error"]


class TestTable:
    def test_it_knows_every_field_of_the_official_client(self) -> None:
        headers = {"user_profile_id", "workspace_id"}
        fields = get_type_hints(message_create_params.MessageCreateParamsStreaming).keys()
        assert fields - headers <= MessagesBody.model_fields.keys()
        fields = get_type_hints(MessageCountTokensParams).keys()
        assert fields - headers <= CountTokensBody.model_fields.keys()

    def test_capabilities_show_it(self, server: Server) -> None:
        routes = server.http.get("/v1/capabilities").json()["routes"]
        for path, body in (("", MessagesBody), ("/count_tokens", CountTokensBody)):
            rows = routes[f"/v1/messages{path}"]["parameters"]
            assert rows.keys() == body.model_fields.keys()
            assert rows["tools"]["accepts"] == "[]"
