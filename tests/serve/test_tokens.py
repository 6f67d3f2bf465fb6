import json
import threading
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.serve.server import Server
from tests.tiny import BOS_TOKEN_ID, VOCAB_SIZE

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}


def tokenize(server: Server, **fields: Any) -> dict[str, Any]:
    reply = server.http.post("/tokenize", json=fields)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def detokenize(server: Server, tokens: list[int]) -> str:
    reply = server.http.post("/detokenize", json={"tokens": tokens})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["prompt"])


def rendered(server: Server, *messages: dict[str, Any], **fields: Any) -> str:
    """The prompt that a conversation becomes, without our template's beginning and end."""
    text = detokenize(server, tokenize(server, messages=list(messages), **fields)["tokens"])
    assert text.startswith("<s>[")
    return text.removeprefix("<s>").removesuffix("[assistant]")


def refused(server: Server, route: str, param: str | None, **fields: Any) -> str:
    """The message of a 400 about `param`."""
    reply = server.http.post(route, content=json.dumps(fields), headers={"content-type": JSON})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    return str(error["message"])


JSON = "application/json"


class TestTokenize:
    def test_a_text_is_told_in_tokens_as_the_model_reads_it(self, chat_server: Server) -> None:
        answer = tokenize(chat_server, prompt="a é", model="other", return_token_strs=True)
        assert answer == {
            "count": 5,
            "max_model_len": 512,
            "tokens": [BOS_TOKEN_ID, *"a é".encode()],
            "token_strs": ["<s>", "a", "Ġ", "Ã", "©"],
        }
        plain = tokenize(chat_server, prompt="a é", add_special_tokens=False)
        assert plain["tokens"] == [*"a é".encode()]
        assert plain["token_strs"] is None
        assert tokenize(chat_server, prompt="")["tokens"] == [BOS_TOKEN_ID]

    def test_messages_become_the_prompt_that_chat_computes(self, chat_server: Server) -> None:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
        for fields in (
            {},
            {"add_generation_prompt": False},
            {"continue_final_message": True},
            {"chat_template_kwargs": {"tone": "kind"}},
            {"documents": [{"title": "Emma"}]},
            {"add_special_tokens": True},
            {"chat_template": "{{ messages[0].content }}"},
        ):
            body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **fields}
            chat = chat_server.http.post("/v1/chat/completions", json=body).json()
            answer = tokenize(chat_server, messages=messages, **fields)
            assert answer["tokens"] == chat["prompt_token_ids"]
            assert answer["count"] == chat["usage"]["prompt_tokens"]

    def test_a_text_longer_than_the_context_is_counted_all_the_same(
        self, chat_server: Server
    ) -> None:
        assert tokenize(chat_server, prompt="x" * 1000)["count"] == 1001

    def test_what_is_no_text_and_no_conversation_is_refused(self, chat_server: Server) -> None:
        hi = [{"role": "user", "content": "Hi"}]
        refused(chat_server, "/tokenize", "prompt")
        refused(chat_server, "/tokenize", "prompt", prompt="x", messages=hi)
        refused(chat_server, "/tokenize", "prompt", prompt=5)
        refused(chat_server, "/tokenize", "messages", messages=[])
        refused(chat_server, "/tokenize", "documents", prompt="x", documents=[])
        refused(chat_server, "/tokenize", "temperature", prompt="x", temperature=0)
        message = refused(chat_server, "/tokenize", "tools", messages=hi, tools=[{}])
        assert "tool calls are not supported yet" in message
        reply = chat_server.http.post("/tokenize", json={"prompt": "x", "model": "gpt-4"})
        assert reply.status_code == 404


class TestDetokenize:
    def test_tokens_become_the_text_they_came_from(self, chat_server: Server) -> None:
        for text in ("a é 🫠\n", "<s>", ""):
            tokens = tokenize(chat_server, prompt=text, add_special_tokens=False)["tokens"]
            assert detokenize(chat_server, tokens) == text
        assert detokenize(chat_server, [BOS_TOKEN_ID, 0xC3]) == "<s>\ufffd"

    @pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 10**9, 2**70, "a", 1.5, True, None])
    def test_what_is_not_in_the_vocabulary_is_refused(
        self, chat_server: Server, token_id: Any
    ) -> None:
        refused(chat_server, "/detokenize", "tokens", tokens=[97, token_id])
        refused(chat_server, "/detokenize", "tokens")


class TestMessages:
    """What a template is told of every legal form of a message."""

    def test_text_parts_are_joined_by_line_breaks(self, chat_server: Server) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        for role in ("system", "user", "tool", "assistant"):
            assert rendered(chat_server, {"role": role, "content": parts[:1]}) == f"[{role}]a;"
            assert rendered(chat_server, {"role": role, "content": parts}) == f"[{role}]a\nb;"

    def test_names_and_tool_call_ids_are_passed_on(self, chat_server: Server) -> None:
        message = {"role": "user", "name": "Ann", "content": "a"}
        assert rendered(chat_server, message) == "[userAnn]a;"
        message = {"role": "tool", "tool_call_id": "c1", "content": "a"}
        assert rendered(chat_server, message) == "[toolc1]a;"

    def test_calls_of_tools_are_history(self, chat_server: Server) -> None:  # B091
        for message in (
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "assistant", "tool_calls": [CALL], "content": None},
            {"role": "assistant", "tool_calls": [CALL], "content": ""},
        ):
            assert rendered(chat_server, message) == "[assistant]c1:add<x=1>;"
        empty = {**CALL, "function": {"name": "f", "arguments": ""}}
        message = {"role": "assistant", "tool_calls": [empty], "content": "so"}
        assert rendered(chat_server, message) == "[assistant]soc1:f;"

    def test_calls_are_text_to_a_template_that_does_not_know_them(
        self, chat_server: Server
    ) -> None:
        template = "<s>[{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        other = {**CALL, "function": {"name": "neg", "arguments": '{"x": "é"}'}}
        add, neg = (
            '{"name": "add", "arguments": {"x": 1}}',
            '{"name": "neg", "arguments": {"x": "é"}}',
        )
        for said, text in (({}, ""), ({"content": None}, ""), ({"content": "so"}, "so\n")):
            message = {"role": "assistant", "tool_calls": [CALL, other], **said}
            found = rendered(chat_server, message, chat_template=template)
            assert found == f"[assistant:{text}{add}\n{neg};"

    def test_refusals_are_what_the_assistant_said(self, chat_server: Server) -> None:
        part = {"type": "refusal", "refusal": "no"}
        for message in (
            {"role": "assistant", "content": [part]},
            {"role": "assistant", "content": None, "refusal": "no"},
        ):
            assert rendered(chat_server, message) == "[assistant]no;"

    def test_an_earlier_answer_is_taken_as_the_client_dumps_it(self, chat_server: Server) -> None:
        client = chat_server.client()
        messages: Any = [{"role": "user", "content": "Hi"}]
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=3, temperature=0
        )
        said = answer.choices[0].message
        text = rendered(chat_server, *messages, said.model_dump())
        assert text == f"[user]Hi;[assistant]{said.content};"

    def test_developers_are_the_system_to_templates_that_do_not_know_them(
        self, chat_server: Server
    ) -> None:
        message = {"role": "developer", "content": "Be kind"}
        assert rendered(chat_server, message) == "[system]Be kind;"
        knows = "<s>[{{ messages[0].role }}]{% if messages[0].role == 'developer' %}!{% endif %}"
        assert rendered(chat_server, message, chat_template=knows) == "[developer]!"

    def test_a_template_refuses_in_its_own_words(self, chat_server: Server) -> None:
        messages = [{"role": "user", "content": "forbidden"}]
        for route in ("/v1/chat/completions", "/tokenize"):
            message = refused(chat_server, route, "messages", messages=messages)
            assert message == "chat template: not that word"
        fields = {"messages": messages, "chat_template": "{% for %}"}
        message = refused(chat_server, "/v1/chat/completions", "chat_template", **fields)
        assert message.startswith("chat template: Expected")

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            ({"role": "user", "content": None}, "a user message must have content"),
            ({"role": "user"}, "a user message must have content"),
            ({"role": "tool", "content": None}, "a tool message must have content"),
            ({"role": "function", "name": "f", "content": "x"}, "'developer', 'user', 'assistant'"),
            ({"role": "user", "content": [{"type": "image_url"}]}, "parts of type text"),
            ({"role": "user", "content": ["x"]}, "parts of type text"),
            ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "assistant have"),
            ({"role": "user", "content": "x", "tool_calls": [CALL]}, "assistant have tool_calls"),
            ({"role": "user", "content": "x", "tool_call_id": "c"}, "tools have tool_call_id"),
            ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "function: Field required"),
            ({"role": "assistant", "function_call": {"name": "f"}}, "send tool_calls"),
            ({"role": "assistant", "audio": {"id": "a"}}, "audio is not supported"),
            ({"role": "user", "content": "x", "mood": "y"}, "unknown parameter"),
        ],
    )
    def test_a_message_that_cannot_be_told_is_refused(
        self, chat_server: Server, message: dict[str, Any], words: str
    ) -> None:
        assert words in refused(chat_server, "/tokenize", "messages", messages=[message])

    @pytest.mark.parametrize("arguments", ["{", "[]", "5", "[" * 100_000])
    def test_arguments_that_are_no_object_are_refused(
        self, chat_server: Server, arguments: str
    ) -> None:
        call = {**CALL, "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        message = refused(chat_server, "/tokenize", "messages", messages=messages)
        assert "arguments of tool call 'c1' must be a JSON object" in message
        assert len(message) < 300


class TestTemplates:
    def test_bos_comes_once_whoever_writes_it(self, chat_server: Server) -> None:
        hi = [{"role": "user", "content": "Hi"}]
        assert tokenize(chat_server, messages=hi)["tokens"].count(BOS_TOKEN_ID) == 1
        assert tokenize(chat_server, prompt="Hi")["tokens"].count(BOS_TOKEN_ID) == 1
        own = tokenize(chat_server, messages=hi, chat_template="{{ messages[0].content }}")
        assert own["tokens"] == [*b"Hi"]

    def test_the_end_of_a_continued_message_is_kept_as_it_is(self, chat_server: Server) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a b  "}]
        fields = {"messages": messages, "continue_final_message": True}
        text = detokenize(chat_server, tokenize(chat_server, **fields)["tokens"])
        assert text == "<s>[user]a;[assistant]a b  "
        trims = "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
        answer = tokenize(chat_server, **fields, chat_template=trims)
        assert detokenize(chat_server, answer["tokens"]) == "a;a b  "
        drops = "{{ messages[0].content }}"
        for more in ({"add_generation_prompt": True}, {"chat_template": drops}):
            refused(chat_server, "/tokenize", "continue_final_message", **fields, **more)

    def test_variables_that_a_template_does_not_read_are_refused(self, chat_server: Server) -> None:
        hi = {"messages": [{"role": "user", "content": "Hi"}]}
        fields = {**hi, "chat_template_kwargs": {"tnoe": "kind"}}
        message = refused(chat_server, "/tokenize", "chat_template_kwargs", **fields)
        assert "nothing in it reads 'tnoe'" in message
        template = "{{ messages[0].content }}"
        fields = {**hi, "documents": [{"title": "Emma"}], "chat_template": template}
        assert "nothing in it reads 'documents'" in refused(
            chat_server, "/tokenize", "documents", **fields
        )
        for name in ("messages", "tools", "template", "self", "continue_final_message"):
            fields = {**hi, "chat_template_kwargs": {name: []}}
            refused(chat_server, "/tokenize", "chat_template_kwargs", **fields)

    def test_only_a_server_that_trusts_templates_takes_them_from_requests(
        self, server: Server
    ) -> None:
        hi = [{"role": "user", "content": "Hi"}]
        for route in ("/v1/chat/completions", "/tokenize"):
            message = refused(server, route, "chat_template", messages=hi, chat_template="{{ 1 }}")
            assert "--trust-request-chat-template" in message
        own = tokenize(server, messages=hi, chat_template="default")
        assert own == tokenize(server, messages=hi)


class TestOtherCallers:
    """Whoever tokenises megabytes keeps nobody else waiting."""

    @pytest.mark.parametrize(("route", "status"), [("/v1/completions", 400), ("/tokenize", 200)])
    def test_a_stream_goes_on_while_a_long_prompt_is_tokenised(
        self, server: Server, client: OpenAI, route: str, status: int
    ) -> None:
        replies: list[httpx.Response] = []

        def ask() -> None:
            with httpx.Client(base_url=server.url, timeout=300) as http:
                replies.append(http.post(route, json={"prompt": "ab " * 700_000}))

        asking = threading.Thread(target=ask)
        extra = {"ignore_eos": True, "return_token_ids": True}
        sizes = []  # of the chunks meanwhile; what waits for a busy loop comes as one chunk
        with client.completions.create(
            model="tiny", prompt="x", max_tokens=30_000, stream=True, extra_body=extra
        ) as stream:
            chunks = iter(stream)
            next(chunks)
            asking.start()
            while not replies:
                sizes.append(len(next(chunks).choices[0].token_ids))
        asking.join()
        assert replies[0].status_code == status
        assert max(sizes) < sum(sizes) / 2
