import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.serve.server import Server
from tests.tiny import EOS_TOKEN_ID

MODEL = "tiny"
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "Hello"}]
HELLO_TEXT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
LONG = {"max_tokens": 30_000, "extra_body": {"ignore_eos": True}}


def complete(client: OpenAI, prompt: Any = "Once", **params: Any) -> Any:
    return client.completions.create(
        **{"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **params}
    )


def chat(client: OpenAI, **params: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 8, **params}
    )


def post(server: Server, route: str, body: Any) -> httpx.Response:
    return server.http.post(route, json=body)


class TestModels:
    def test_the_model_is_listed_and_found(self, client: OpenAI) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL

    def test_another_model_is_not_found(self, client: OpenAI) -> None:
        for call in (
            lambda: client.models.retrieve("gpt-4"),
            lambda: complete(client, model="gpt-4"),
            lambda: chat(client, model="org/gpt-4"),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            assert caught.value.code == "model_not_found"
            assert caught.value.param == "model"


class TestCompletions:
    def test_tokens_are_counted_and_the_reply_is_complete(self, client: OpenAI) -> None:
        reply = complete(client, extra_body={"return_token_ids": True})
        choice = reply.choices[0]
        assert reply.object == "text_completion"
        assert reply.system_fingerprint.startswith("nano-")
        assert choice.finish_reason == "length"
        assert choice.prompt_token_ids == list(b"Once")
        assert len(choice.token_ids) == 8
        assert bytes(choice.token_ids).decode("utf-8", "replace") == choice.text
        usage = reply.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 8, 12)

    def test_every_form_of_prompt_means_the_same(self, client: OpenAI) -> None:
        first, second = complete(client, "Once"), complete(client, "Twice")
        expected = [first.choices[0].text, second.choices[0].text]
        assert expected[0] != expected[1]
        for prompt in (["Once", "Twice"], [list(b"Once"), list(b"Twice")]):
            reply = complete(client, prompt)
            assert [choice.text for choice in reply.choices] == expected
            assert [choice.index for choice in reply.choices] == [0, 1]
            assert reply.usage.prompt_tokens == 9
        assert complete(client, list(b"Once")).choices[0].text == expected[0]

    def test_choices_are_numbered_by_prompt_then_completion(self, client: OpenAI) -> None:
        params = {"temperature": 1, "seed": 5}
        reply = complete(client, ["Once", "Twice"], n=2, **params)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        texts = [choice.text for choice in reply.choices]
        assert len(set(texts)) == 4
        assert texts[0] == complete(client, "Once", **params).choices[0].text
        assert texts[3] == complete(client, "Twice", temperature=1, seed=6).choices[0].text

    def test_echo_puts_the_prompt_in_front(self, client: OpenAI) -> None:
        plain = complete(client).choices[0].text
        assert complete(client, echo=True).choices[0].text == "Once" + plain
        assert complete(client, list(b"Once"), echo=True).choices[0].text == "Once" + plain

    def test_logprobs_come_as_four_parallel_lists(self, client: OpenAI) -> None:
        params = {"logprobs": 3, "logit_bias": {str(ord("x")): 5}}
        choice = complete(client, **params).choices[0]
        logprobs = choice.logprobs
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.text_offset == list(range(8))
        for token, logprob, top in zip(
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs
        ):
            assert top[token] == logprob < 0
            assert 1 <= len(top) <= 4  # tokens that look alike share an entry
            assert list(top.values()) == sorted(top.values(), reverse=True)

    def test_echo_with_logprobs_scores_the_prompt_too(self, client: OpenAI) -> None:
        prompt = "Once upon"
        whole = complete(client, prompt, echo=True, logprobs=2)
        scored = complete(client, prompt, echo=True, logprobs=2, max_tokens=0)
        assert scored.choices[0].text == prompt
        assert scored.choices[0].finish_reason == "length"
        assert scored.usage.completion_tokens == 0
        for choice, num_tokens in ((whole.choices[0], 17), (scored.choices[0], 9)):
            logprobs = choice.logprobs
            assert "".join(logprobs.tokens) == choice.text
            assert len(logprobs.tokens) == len(logprobs.top_logprobs) == num_tokens
            assert logprobs.token_logprobs[0] is None
            assert all(logprob < 0 for logprob in logprobs.token_logprobs[1:])
        assert whole.choices[0].logprobs.tokens[:9] == scored.choices[0].logprobs.tokens
        greedy = complete(client, prompt, logprobs=2).choices[0].logprobs
        assert whole.choices[0].logprobs.token_logprobs[9:] == greedy.token_logprobs

    @pytest.mark.parametrize("prompt", ["a🫠b<s>c", [*"é".encode(), 256, 65]])  # B087
    def test_offsets_point_into_the_text(self, client: OpenAI, prompt: Any) -> None:
        extra = {"logit_bias": {str(b): 100 for b in b"xyz"}, "extra_body": {"ignore_eos": True}}
        params = {"echo": True, "logprobs": 0, "max_tokens": 4, **extra}
        choice = complete(client, prompt, **params).choices[0]
        begins = {}
        for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens):
            if token.isascii():
                assert choice.text[offset:].startswith(token)
                begins[offset] = token
        assert len(begins) > 5
        chunks = [chunk.choices[0] for chunk in complete(client, prompt, stream=True, **params)]
        streamed = [chunk.logprobs.text_offset for chunk in chunks if chunk.logprobs]
        assert list(itertools.chain(*streamed)) == choice.logprobs.text_offset

    def test_prompt_logprobs_come_by_token_id(self, client: OpenAI) -> None:
        reply = complete(client, "ab", extra_body={"prompt_logprobs": 1})
        first, second = reply.choices[0].prompt_logprobs
        assert first is None
        assert second[str(ord("b"))]["decoded_token"] == "b"
        assert min(entry["rank"] for entry in second.values()) == 1

    @pytest.mark.parametrize("echo", [False, True])
    def test_a_stream_adds_up_to_the_whole(self, client: OpenAI, echo: bool) -> None:
        params = {"n": 2, "temperature": 1, "seed": 3, "echo": echo}
        whole = complete(client, ["Once", "Twice"], **params)
        options = {"include_usage": True}
        chunks = list(
            complete(client, ["Once", "Twice"], stream=True, stream_options=options, **params)
        )
        *chunks, last = chunks
        for choice in whole.choices:
            mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
            assert "".join(part.text for part in mine) == choice.text
            reasons = [part.finish_reason for part in mine]
            assert reasons == [None] * (len(mine) - 1) + [choice.finish_reason]
        assert all(chunk.usage is None for chunk in chunks)
        assert last.choices == []
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens
        assert last.usage.completion_tokens == whole.usage.completion_tokens

    def test_a_stream_of_logprobs_adds_up_to_the_whole(self, client: OpenAI) -> None:
        whole = complete(client, logprobs=2, echo=True).choices[0].logprobs
        parts = [
            chunk.choices[0].logprobs
            for chunk in complete(client, logprobs=2, echo=True, stream=True)
            if chunk.choices[0].logprobs is not None
        ]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = list(itertools.chain.from_iterable(getattr(part, name) for part in parts))
            assert joined == getattr(whole, name)


class TestChat:
    def test_a_chat_is_a_completion_of_the_rendered_template(self, client: OpenAI) -> None:
        reply = chat(client)
        assert reply.object == "chat.completion"
        assert reply.choices[0].message.role == "assistant"
        plain = complete(client, HELLO_TEXT)
        assert reply.choices[0].message.content == plain.choices[0].text
        assert reply.usage.prompt_tokens == plain.usage.prompt_tokens

    def test_text_parts_and_copied_answers_are_messages(self, client: OpenAI) -> None:
        answer = chat(client).choices[0].message
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        assert chat(client, messages=parts, seed=1).choices[0] == chat(client, seed=1).choices[0]
        history = [*HELLO, answer.model_dump(), {"role": "user", "content": "More"}]
        assert chat(client, messages=history).usage.prompt_tokens > 40

    @pytest.mark.parametrize("n", [1, 2])
    def test_a_stream_has_one_role_one_end_and_usage_last(self, client: OpenAI, n: int) -> None:
        params = {"n": n, "temperature": 1, "seed": 4}
        whole = chat(client, **params)
        stream = chat(client, stream=True, stream_options={"include_usage": True}, **params)
        *chunks, last = stream
        for choice in whole.choices:
            mine = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
            roles = [part.delta.role for part in mine]
            assert roles == ["assistant"] + [None] * (len(mine) - 1)
            assert "".join(part.delta.content or "" for part in mine) == choice.message.content
            reasons = [part.finish_reason for part in mine]
            assert reasons == [None] * (len(mine) - 1) + ["length"]
        assert last.choices == []
        assert last.usage == whole.usage.model_copy(
            update={"prompt_tokens_details": last.usage.prompt_tokens_details}
        )
        assert len({chunk.id for chunk in [*chunks, last]}) == 1

    def test_a_stream_is_server_sent_events_that_end_in_done(self, server: Server) -> None:
        body = {"messages": HELLO, "max_tokens": 2, "stream": True, "temperature": 0}
        reply = post(server, "/v1/chat/completions", body)
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = reply.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert all("usage" not in chunk for chunk in chunks)

    def test_logprobs_hold_the_token_its_bytes_and_the_likeliest(self, client: OpenAI) -> None:
        extra = {"ignore_eos": True, "skip_special_tokens": False}
        choice = chat(client, logprobs=True, top_logprobs=4, extra_body=extra).choices[0]
        data = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        assert data.decode("utf-8", "replace") == choice.message.content
        for entry in choice.logprobs.content:
            tops = [top.logprob for top in entry.top_logprobs]
            assert len(tops) == 4
            assert tops == sorted(tops, reverse=True)
            assert entry.logprob == tops[0]  # greedy
        assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
        assert chat(client).choices[0].logprobs is None

    def test_logprobs_are_streamed_with_their_text(self, client: OpenAI) -> None:
        whole = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        chunks = chat(client, logprobs=True, top_logprobs=2, stream=True)
        parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs is not None]
        assert [entry for part in parts for entry in part.content] == whole

    def test_without_a_limit_an_answer_ends_with_the_context(
        self, server: Server, client: OpenAI
    ) -> None:
        """OpenAI's chat has no default limit; a completion's is 16."""
        reply = chat(client, max_tokens=openai.NOT_GIVEN, logit_bias={str(EOS_TOKEN_ID): 100})
        assert reply.choices[0].finish_reason == "stop"
        body = {"prompt": "Once", "temperature": 0, "ignore_eos": True}
        reply = post(server, "/v1/completions", body).json()
        assert reply["usage"]["completion_tokens"] == 16

    def test_token_ids_are_returned_when_asked(self, client: OpenAI) -> None:
        extra = {"return_token_ids": True, "ignore_eos": True}
        reply = chat(client, extra_body=extra)
        assert len(reply.prompt_token_ids) == reply.usage.prompt_tokens
        assert len(reply.choices[0].token_ids) == 8
        chunks = list(chat(client, extra_body=extra, stream=True))
        assert chunks[0].prompt_token_ids == reply.prompt_token_ids
        streamed = [getattr(chunk.choices[0], "token_ids", None) or [] for chunk in chunks]
        assert list(itertools.chain.from_iterable(streamed)) == reply.choices[0].token_ids


class TestParameters:
    def test_logit_bias_has_string_keys(self, client: OpenAI) -> None:
        reply = complete(client, logit_bias={str(ord("A")): 100})
        assert reply.choices[0].text == "AAAAAAAA"

    def test_a_stop_string_ends_the_text_before_it(self, client: OpenAI) -> None:
        bias = {str(ord("A")): 100}
        for stop in ("AAA", ["zzz", "AAA"]):
            choice = complete(client, logit_bias=bias, stop=stop).choices[0]
            assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", "stop", "AAA")
        extra = {"include_stop_str_in_output": True, "min_tokens": 5}
        choice = complete(client, logit_bias=bias, stop="AAA", extra_body=extra).choices[0]
        assert choice.text == "AAAAA"

    def test_vllm_parameters_are_applied(self, client: OpenAI) -> None:
        def text(**extra: Any) -> str:
            reply = complete(client, temperature=1, seed=1, extra_body=extra)
            return str(reply.choices[0].text)

        assert set(text(allowed_token_ids=[65, 66])) <= {"A", "B"}
        assert text(top_k=1) == complete(client).choices[0].text
        assert text(min_p=1.0) == complete(client).choices[0].text
        assert text() != complete(client).choices[0].text
        assert text(allowed_token_ids=[65, 66], bad_words=["A"]) == "BBBBBBBB"
        assert text(allowed_token_ids=[65], stop_token_ids=[65]) == ""

    def test_equal_seeds_give_equal_text_and_no_seed_a_new_one(self, client: OpenAI) -> None:
        texts = [complete(client, temperature=1, seed=s).choices[0].text for s in (7, 7, 8)]
        assert texts[0] == texts[1] != texts[2]
        unseeded = {complete(client, temperature=1).choices[0].text for _ in range(3)}
        assert len(unseeded) == 3

    def test_the_seed_that_was_drawn_is_returned_and_repeats_the_answer(
        self, client: OpenAI
    ) -> None:
        drawn = complete(client, temperature=1, n=2).choices
        for choice in drawn:
            again = complete(client, temperature=1, seed=choice.seed).choices[0]
            assert again.text == choice.text
        ends = [
            chunk.choices[0]
            for chunk in chat(client, temperature=1, seed=5, n=2, stream=True)
            if chunk.choices[0].finish_reason
        ]
        assert {choice.index: choice.seed for choice in ends} == {0: 5, 1: 6}

    def test_a_repeated_prompt_is_read_from_the_cache_unless_salted(self, client: OpenAI) -> None:
        prompt = "A prompt of more than two blocks of the KV cache, asked for again"

        def num_cached(**params: Any) -> int:
            return int(complete(client, prompt, **params).usage.prompt_tokens_details.cached_tokens)

        num_cached()
        assert num_cached() == 64
        assert num_cached(extra_body={"cache_salt": "mine"}) == 0

    def test_neutral_parameters_change_nothing(self, client: OpenAI) -> None:
        neutral: dict[str, Any] = {
            "user": "me",
            "metadata": {"a": "b"},
            "store": False,
            "service_tier": "auto",
            "n": 1,
            "frequency_penalty": 0,
            "stop": None,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
        }
        assert chat(client, seed=1, **neutral).choices == chat(client, seed=1).choices
        assert complete(client, seed=1, user="me", best_of=1, suffix=None).choices == (
            complete(client, seed=1).choices
        )

    def test_max_completion_tokens_is_the_new_name_of_max_tokens(self, client: OpenAI) -> None:
        reply = chat(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=3)
        assert reply.usage.completion_tokens == 3

    def test_a_callers_request_id_may_repeat(self, client: OpenAI) -> None:
        def call(_: int) -> Any:
            return complete(client, extra_headers={"X-Request-Id": "same"})

        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(call, range(4)))
        assert {reply.id for reply in replies} == {"cmpl-same"}
        assert len({reply.choices[0].text for reply in replies}) == 1


BAD_PROMPTS: list[Any] = ["", [], [[]], ["ok", ""], [1, "a"], ["a", 1], {}, None, 5, [260], [-1]]
BAD_PROMPTS += [[[1], [260]], "x" * 40_000, [2**40], [True], "\ud800"]
BAD_MESSAGES: list[Any] = [
    [],
    None,
    "Hello",
    [{}],
    [{"role": "user"}, "x"],
    [{"role": "robot", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": None}],
    [{"role": "system"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "x", "extra": 1}],
]
BAD_PARAMS: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 1.5),
    ("n", 129),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("logit_bias", {"65": 101}),
    ("logit_bias", {"260": 1}),
    ("logit_bias", {"A": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [260]),
    ("bad_words", [""]),
    ("min_tokens", -1),
    ("min_tokens", 10),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "8"),
    ("stop", ""),
    ("stop", ["a", 1]),
    ("stop", ["x"] * 65),
    ("stop", "\ud800"),
    ("bad_words", ["\ud800"]),
    ("cache_salt", "\ud800"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [260]),
    ("seed", -1),
    ("seed", 2**63),
    ("prompt_logprobs", -2),
    ("prompt_logprobs", 21),
    ("priority", 2**40),
    ("cache_salt", ""),
    ("stream_options", {"include_usage": True}),
    ("store", True),
    ("service_tier", "flex"),
    ("ignore_eos", "yes"),
    ("temprature", 0.5),
]
BAD_CHAT_PARAMS: list[tuple[str, Any]] = [
    ("max_completion_tokens", 0),
    ("top_logprobs", 3),
    ("tools", [{"type": "function"}]),
    ("response_format", {"type": "json_object"}),
    ("chat_template_kwargs", {"messages": []}),
    ("echo", True),
]
BAD_COMPLETION_PARAMS: list[tuple[str, Any]] = [
    ("logprobs", 21),
    ("logprobs", -2),
    ("best_of", 3),
    ("suffix", "x"),
    ("messages", HELLO),
]


def assert_refused(server: Server, route: str, body: dict[str, Any], param: str | None) -> None:
    """400 in OpenAI's shape, naming the parameter; the server goes on."""
    content = json.dumps(body)
    reply = server.http.post(route, content=content, headers=JSON)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    if param is not None and param not in ("prompt", "messages"):
        assert param in error["message"]


@pytest.fixture(scope="class")
def a_surviving_server(server: Server, client: OpenAI) -> Iterator[None]:
    yield
    assert server.http.get("/health").status_code == 200
    assert complete(client, max_tokens=1).usage.completion_tokens == 1


@pytest.mark.usefixtures("a_surviving_server")
class TestUsersReports:
    def test_hundreds_of_calls_at_once_are_all_answered(self, server: Server) -> None:  # B053
        def call(index: int) -> dict[str, Any]:
            body = {"prompt": f"call {index % 7}", "seed": index % 7, "max_tokens": 3}
            with httpx.Client(base_url=server.url, timeout=60) as http:
                reply = http.post("/v1/completions", json=body)
            assert reply.status_code == 200
            return reply.json()

        with ThreadPoolExecutor(64) as pool:
            pending = [pool.submit(call, index) for index in range(200)]
            assert server.http.get("/health").status_code == 200
            texts = [future.result()["choices"][0]["text"] for future in pending]
        for index, text in enumerate(texts):
            assert text == texts[index % 7]

    @pytest.mark.parametrize(
        ("route", "body"),
        [
            ("completions", {"prompt": "correct horse", "echo": True, "logprobs": 5, "top_k": 1}),
            ("completions", {"prompt": "a", "logprobs": 5, "allowed_token_ids": [97]}),
            (
                "chat/completions",
                {
                    "messages": [{"role": "user", "content": "hi"}],
                    "logprobs": True,
                    "top_logprobs": 20,
                    "top_p": 0.01,
                },
            ),
        ],
    )
    def test_every_logprob_is_a_finite_number(  # B054
        self, server: Server, route: str, body: dict[str, Any]
    ) -> None:
        reply = server.http.post(f"/v1/{route}", json={"max_tokens": 3, **body})
        assert reply.status_code == 200

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        json.loads(reply.text, parse_constant=refuse)

    def test_choices_of_one_seed_differ_repeat_and_end_on_their_own(  # B063
        self, client: OpenAI
    ) -> None:
        prompt = "x" * 40
        call: dict[str, Any] = {
            "model": "tiny",
            "prompt": prompt,
            "seed": 5,
            "n": 4,
            "max_tokens": 30,
            "extra_body": {"allowed_token_ids": [46, 97, 98, 99]},
            "stop": ["."],
        }
        first, second = (client.completions.create(**call) for _ in range(2))
        texts = [choice.text for choice in first.choices]
        assert texts == [choice.text for choice in second.choices]
        assert len(set(texts)) > 1
        assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
        assert all(c.finish_reason == "stop" or len(c.text) == 30 for c in first.choices)
        assert first.usage is not None
        assert first.usage.prompt_tokens == 40
        ends = [len(c.text) + (c.finish_reason == "stop") for c in first.choices]
        assert first.usage.completion_tokens == sum(ends)
        streamed = [""] * 4
        for chunk in client.completions.create(**call, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
        assert streamed == texts
        greedy = client.completions.create(**{**call, "temperature": 0})
        assert len({choice.text for choice in greedy.choices}) == 1


class TestRefusals:
    @pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda prompt: repr(prompt)[:20])
    def test_a_bad_prompt(self, server: Server, prompt: Any) -> None:
        assert_refused(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1}, "prompt")

    @pytest.mark.parametrize("messages", BAD_MESSAGES, ids=lambda messages: repr(messages)[:30])
    def test_bad_messages(self, server: Server, messages: Any) -> None:
        assert_refused(server, "/v1/chat/completions", {"messages": messages}, "messages")

    @pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
    def test_a_bad_parameter(self, server: Server, name: str, value: Any) -> None:
        common = {"max_tokens": 2, name: value}
        assert_refused(server, "/v1/completions", {"prompt": "x", **common}, name)
        assert_refused(server, "/v1/chat/completions", {"messages": HELLO, **common}, name)

    @pytest.mark.parametrize(("name", "value"), BAD_CHAT_PARAMS)
    def test_a_bad_parameter_of_chat(self, server: Server, name: str, value: Any) -> None:
        assert_refused(server, "/v1/chat/completions", {"messages": HELLO, name: value}, name)

    @pytest.mark.parametrize(("name", "value"), BAD_COMPLETION_PARAMS)
    def test_a_bad_parameter_of_completions(self, server: Server, name: str, value: Any) -> None:
        assert_refused(server, "/v1/completions", {"prompt": "x", name: value}, name)

    def test_top_logprobs_past_the_limit_are_called_by_their_name(self, server: Server) -> None:
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 21}
        assert_refused(server, "/v1/chat/completions", body, "top_logprobs")

    def test_nan_is_no_number(self, server: Server) -> None:
        for value in (float("nan"), float("inf")):
            body = {"prompt": "x", "temperature": value}
            assert_refused(server, "/v1/completions", body, "temperature")

    def test_a_prompt_that_is_too_long_has_openais_code(self, server: Server) -> None:  # B089
        long = "x" * 40_000
        for route, body in (
            ("/v1/completions", {"prompt": long}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ):
            error = post(server, route, body).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "at most 32767 fit" in error["message"]

    def test_a_body_that_is_not_declared_as_json(self, server: Server) -> None:
        reply = server.http.post("/v1/completions", content=b'{"prompt": "x"}')
        assert reply.status_code == 400
        assert "Content-Type: application/json" in reply.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("prompt", [1.5] * 100_000),
            ("prompt", [[1, "x"]] * 100_000),
            ("logit_bias", {str(i): "x" for i in range(10_000)}),
            ("stop", [1] * 100_000),
            ("stop_token_ids", ["x"] * 100_000),
        ],
    )
    def test_many_mistakes_get_a_short_answer(self, server: Server, name: str, value: Any) -> None:
        reply = post(server, "/v1/completions", {"prompt": "x", name: value})
        assert reply.status_code == 400
        assert len(reply.text) < 1000
        assert reply.json()["error"]["param"] == name

    def test_more_choices_than_a_call_may_have(self, server: Server) -> None:
        body = {"prompt": ["x"] * 33, "n": 128}
        assert_refused(server, "/v1/completions", body, "prompt")

    def test_a_stream_is_refused_before_it_begins(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="top_p"):
            complete(client, top_p=2, stream=True)

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000]
    )
    def test_a_body_that_is_no_json_object(self, server: Server, content: bytes) -> None:
        for route in ("/v1/completions", "/v1/chat/completions"):
            reply = server.http.post(route, content=content, headers=JSON)
            assert reply.status_code == 400
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

    def test_unknown_routes_and_methods_answer_in_openais_shape(self, server: Server) -> None:
        for method, route, status in (
            ("GET", "/v2/nothing", 404),
            ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405),
        ):
            reply = server.http.request(method, route)
            assert reply.status_code == status
            assert reply.json()["error"]["message"]


class TestDisconnect:
    """Four requests run at once, and a long one takes minutes: a fifth shows they were aborted."""

    def test_a_stream_that_is_left_is_aborted(self, client: OpenAI) -> None:
        streams = [complete(client, stream=True, **LONG) for _ in range(4)]
        for stream in streams:
            next(iter(stream))
            stream.close()
        assert complete(client).usage.completion_tokens == 8

    def test_a_call_that_is_left_is_aborted(self, server: Server, client: OpenAI) -> None:
        impatient = server.client(timeout=0.5)

        def call(_: int) -> None:
            with pytest.raises(openai.APITimeoutError):
                complete(impatient, **LONG)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(call, range(4)))
        assert complete(client).usage.completion_tokens == 8


def test_importing_the_app_leaves_torch_alone() -> None:
    code = "import sys, nano.serve.app; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
