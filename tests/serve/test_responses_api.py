import json
from typing import Any, get_type_hints

import openai
import pytest
from openai import OpenAI
from openai.types.responses import response_create_params

from nano.errors import InvalidRequest
from nano.serve.openai.chat_body import ChatBody
from nano.serve.responses.body import ResponsesBody
from tests.serve.server import Server

MODEL = "tiny"
LOGPROBS = "message.output_text.logprobs"
USER = {"role": "user", "content": "Hello"}


def respond(client: OpenAI, given: Any = "Hello", **params: Any) -> Any:
    return client.responses.create(
        **{"model": MODEL, "input": given, "temperature": 0, "max_output_tokens": 8, **params}
    )


def chat(client: OpenAI, *messages: Any, **params: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8, **params}
    )


def refusal(server: Server, **body: Any) -> Any:
    answer = server.http.post("/v1/responses", json={"input": "Hello", **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


class TestCreate:
    def test_a_text_is_answered_as_a_chat_is(self, client: OpenAI) -> None:
        response, expected = respond(client), chat(client, USER)
        assert response.object == "response"
        assert response.output_text == expected.choices[0].message.content
        (item,) = response.output
        assert (item.type, item.role) == ("message", "assistant")
        assert response.system_fingerprint == expected.system_fingerprint
        usage = response.usage
        assert usage.input_tokens == expected.usage.prompt_tokens
        assert usage.output_tokens == expected.usage.completion_tokens
        assert usage.total_tokens == expected.usage.total_tokens
        assert usage.output_tokens_details.reasoning_tokens == 0

    def test_what_was_asked_is_told(self, client: OpenAI) -> None:
        asked = {"instructions": "Be brief.", "top_p": 0.5, "metadata": {"a": "b"}, "user": "me"}
        response = respond(client, **asked, temperature=0.25)
        told = {**asked, "temperature": 0.25, "max_output_tokens": 8, "model": MODEL}
        assert {name: getattr(response, name) for name in told} == told
        assert (response.store, response.previous_response_id) == (False, None)

    def test_an_answer_that_is_cut_is_incomplete(self, client: OpenAI) -> None:
        cut = respond(client, max_output_tokens=2)
        assert cut.status == cut.output[0].status == "incomplete"
        assert cut.incomplete_details.reason == "max_output_tokens"
        assert cut.usage.output_tokens == 2

    def test_an_answer_that_ends_by_itself_is_completed(self, client: OpenAI) -> None:
        ended = respond(client, temperature=1, max_output_tokens=20_000)
        assert ended.status == ended.output[0].status == "completed"
        assert ended.incomplete_details is None

    def test_instructions_are_a_system_message_in_front(self, client: OpenAI) -> None:
        response = respond(client, instructions="Be brief.")
        expected = chat(client, {"role": "system", "content": "Be brief."}, USER)
        assert response.output_text == expected.choices[0].message.content
        assert response.usage.input_tokens == expected.usage.prompt_tokens

    def test_output_copied_back_is_the_conversation(self, client: OpenAI) -> None:
        first = respond(client, include=[LOGPROBS])
        more = {"role": "user", "content": [{"type": "input_text", "text": "More"}]}
        second = respond(client, [USER, *first.output, more])
        answer = {"role": "assistant", "content": first.output_text}
        expected = chat(client, USER, answer, {"role": "user", "content": "More"})
        assert second.output_text == expected.choices[0].message.content
        assert second.usage.input_tokens == expected.usage.prompt_tokens

    def test_earlier_function_calls_are_a_chats_tool_calls(self) -> None:
        call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
        result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
        body = ResponsesBody.model_validate({"input": [USER, call, result]})
        function = {"name": "add", "arguments": '{"a": 1}'}
        calls = [{"id": "c1", "type": "function", "function": function}]
        messages = [
            USER,
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
        expected = ChatBody.model_validate({"messages": messages}).messages
        found = body.to_chat().messages
        assert [m.to_template() for m in found] == [m.to_template() for m in expected]

    def test_a_template_that_knows_no_function_calls_is_told_in_text(self, client: OpenAI) -> None:
        call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
        text = {"role": "assistant", "content": '{"name": "add", "arguments": {}}'}
        found, expected = respond(client, [USER, call]), chat(client, USER, text)
        assert found.output_text == expected.choices[0].message.content
        assert found.usage.input_tokens == expected.usage.prompt_tokens

    def test_logprobs_are_those_of_a_chat(self, client: OpenAI) -> None:
        part = respond(client, include=[LOGPROBS], top_logprobs=2).output[0].content[0]
        expected = chat(client, USER, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert [entry.to_dict() for entry in part.logprobs] == [e.to_dict() for e in expected]
        assert respond(client).output[0].content[0].logprobs == []

    def test_sampling_parameters_are_applied(self, client: OpenAI) -> None:
        greedy = respond(client).output_text
        drawn = respond(client, temperature=1.5)
        seed = {"seed": drawn.seed}
        assert respond(client, temperature=1.5, extra_body=seed).output_text == drawn.output_text
        assert greedy != drawn.output_text
        for only_the_best in ({"top_k": 1}, {"min_p": 1.0}):
            chosen = respond(client, temperature=1.5, extra_body=only_the_best)
            assert chosen.output_text == greedy
        assert respond(client, temperature=1.5, top_p=1e-6).output_text == greedy

    def test_a_prompt_is_read_from_the_cache_unless_salted(self, client: OpenAI) -> None:
        def num_cached_tokens(**extra: Any) -> int:
            usage = respond(client, "A long story. " * 9, extra_body=extra).usage
            assert usage is not None
            return int(usage.input_tokens_details.cached_tokens)

        assert num_cached_tokens() == 0
        assert num_cached_tokens() > 50
        assert num_cached_tokens(cache_salt="mine") == 0

    def test_what_came_of_speculation_is_told_when_asked(self, client: OpenAI) -> None:
        assert not hasattr(respond(client), "speculative")
        prediction = {"type": "content", "content": "Hello"}
        predicted = respond(client, extra_body={"prediction": prediction})
        assert predicted.speculative["methods"] == ["prediction"]
        assert predicted.output_text == respond(client).output_text
        plain = respond(client, extra_body={"speculative": {"enabled": False}})
        assert not plain.speculative["enabled"]

    def test_neutral_fields_change_nothing(self, client: OpenAI) -> None:
        response = respond(
            client,
            include=["reasoning.encrypted_content"],
            text={"format": {"type": "text"}, "verbosity": "medium"},
            tools=[],
            tool_choice="auto",
            parallel_tool_calls=True,
            max_tool_calls=3,
            reasoning={"effort": "none"},
            safety_identifier="me",
            prompt_cache_key="mine",
            service_tier="auto",
            truncation="disabled",
            store=False,
            background=False,
            previous_response_id=None,
        )
        assert response.output_text == respond(client).output_text


class TestStream:
    @pytest.mark.parametrize("limit", [8, 20_000])
    def test_events_come_in_order_and_add_up_to_the_whole(self, client: OpenAI, limit: int) -> None:
        params = {"temperature": 1, "max_output_tokens": limit, "include": [LOGPROBS]}
        extra = {"seed": 7}
        whole = respond(client, **params, extra_body=extra)
        events = list(respond(client, **params, extra_body=extra, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        ends = ["output_text.done", "content_part.done", "output_item.done", whole.status]
        assert kinds[-4:] == ends
        assert set(kinds[4:-4]) == {"output_text.delta"}
        text_done, part_done, item_done, last = events[-4:]
        deltas = events[4:-4]
        assert "".join(delta.delta for delta in deltas) == whole.output_text == text_done.text
        logprobs = [entry.token for delta in deltas for entry in delta.logprobs]
        assert logprobs == [entry.token for entry in whole.output[0].content[0].logprobs]
        assert part_done.part == whole.output[0].content[0]
        assert item_done.item == last.response.output[0]
        for event in events[:2]:
            assert event.response.status == "in_progress"
            assert (event.response.output, event.response.usage) == ([], None)
        ids = {event.item_id for event in (*deltas, text_done, part_done)}
        assert ids == {events[2].item.id, item_done.item.id}
        same = {"id", "created_at", "output", "usage"}
        assert last.response.to_dict().keys() == whole.to_dict().keys()
        for name, value in whole.to_dict().items():
            assert name in same or last.response.to_dict()[name] == value
        assert last.response.usage.output_tokens == whole.usage.output_tokens

    def test_every_event_is_named_after_its_type_and_none_is_done(self, server: Server) -> None:
        body = {"input": "Hello", "max_output_tokens": 4, "stream": True}
        with server.http.stream("POST", "/v1/responses", json=body) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            messages = [message.split("\n") for message in answer.read().decode().split("\n\n")]
        assert messages.pop() == [""]
        for name, data in messages:
            assert name == "event: " + json.loads(data.removeprefix("data: "))["type"]

    def test_the_clients_own_helper_follows_it(self, client: OpenAI) -> None:
        params = {"model": MODEL, "input": "Hello", "temperature": 0}
        with client.responses.stream(**params, max_output_tokens=8) as stream:
            snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        assert snapshots[-1] == respond(client).output_text


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("store", True, "answers are not kept"),
            ("previous_response_id", "resp_1", "send the conversation as input"),
            ("conversation", "conv_1", "send all of it as input"),
            ("background", True, "answers are not kept"),
            ("prompt", {"id": "pmpt_1"}, "send the text as input"),
            ("truncation", "auto", "a long input is not cut"),
            ("tools", [{"type": "web_search"}], "tools are not supported"),
            ("tool_choice", "required", "tools are not supported"),
            ("reasoning", {"effort": "high"}, "reasoning is not set apart"),
            ("text", {"format": {"type": "json_object"}}, "only plain text"),
            ("stream_options", {"include_obfuscation": True}, "include_obfuscation"),
            ("include", ["file_search_call.results"], LOGPROBS),
            ("max_tokens", 5, "unknown parameter 'max_tokens'"),
            ("stop", "x", "unknown parameter 'stop'"),
        ],
    )
    def test_what_is_not_served_is_refused_by_name_with_a_reason(
        self, server: Server, field: str, value: Any, words: str
    ) -> None:
        error = refusal(server, **{field: value})
        assert error["param"] == field
        assert words in error["message"]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("max_output_tokens", 0),
            ("max_output_tokens", "8"),
            ("temperature", -1),
            ("top_p", 0),
            ("top_k", -5),
            ("top_logprobs", -3),
            ("seed", -1),
            ("min_p", 2),
            ("priority", 1),
            ("speculative", {"method": "telepathy"}),
            ("timeout_ms", 0),
            ("max_queue_ms", -1),
            ("metadata", {"a": 1}),
        ],
    )
    def test_a_bad_value_is_called_by_the_name_that_the_caller_wrote(
        self, server: Server, field: str, value: Any
    ) -> None:
        error = refusal(server, **{field: value})
        assert error["param"] == field
        assert field in error["message"]

    def test_top_logprobs_say_what_they_need(self, server: Server) -> None:
        assert "include" in refusal(server, top_logprobs=3)["message"]

    def test_top_logprobs_past_the_limit_are_called_by_their_name(self, server: Server) -> None:
        error = refusal(server, include=[LOGPROBS], top_logprobs=1000)
        assert error["param"] == "top_logprobs"
        assert "1000" in error["message"]

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (5, "a string or a list"),
            ([], "input"),
            ([5], "input.0"),
            ([{"role": "robot", "content": "Hello"}], "'developer'"),
            ([{"role": "user"}], "content"),
            ([{"role": "user", "content": None}], "a string or a list"),
            ([{"type": "reasoning", "summary": []}], "'reasoning'"),
            ([{"type": "item_reference", "id": "msg_1"}], "'item_reference'"),
            ([{"role": "user", "content": [{"type": "input_image"}]}], "'input_image'"),
            ([{"type": ["x"], "role": "user"}], "['x']"),
            (
                [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "no"}],
                "arguments",
            ),
        ],
    )
    def test_bad_input(self, server: Server, given: Any, words: str) -> None:
        error = refusal(server, input=given)
        assert error["param"] == "input"
        assert words in error["message"]

    def test_a_template_keeps_its_own_words(self) -> None:
        error = InvalidRequest("chat template: messages must alternate", "messages")
        chat = ResponsesBody.model_validate({"input": "Hello"}).to_chat()
        respelled = chat.respelled(error)
        assert (str(respelled), respelled.param) == (str(error), "input")

    def test_input_that_is_too_long_has_openais_code(self, server: Server) -> None:
        error = refusal(server, input="x" * 40_000)
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")

    def test_input_is_required(self, server: Server) -> None:
        answer = server.http.post("/v1/responses", json={})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "input"

    def test_no_answer_can_be_asked_for_later(self, client: OpenAI) -> None:
        response = respond(client)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(response.id)


class TestTable:
    def test_it_knows_every_field_of_the_official_client(self) -> None:
        fields = get_type_hints(response_create_params.ResponseCreateParamsStreaming).keys()
        assert fields <= ResponsesBody.model_fields.keys()

    def test_capabilities_show_it(self, server: Server) -> None:
        routes = server.http.get("/v1/capabilities").json()["routes"]
        rows = routes["/v1/responses"]["parameters"]
        assert rows.keys() == ResponsesBody.model_fields.keys()
        assert rows["store"]["accepts"] == "false"
