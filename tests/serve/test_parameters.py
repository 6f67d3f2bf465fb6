"""Every field of the bodies of chat and completions does what the table of parameters says.

The tests go through the same table as the server (`nano/serve/openai/parameters.py`): whoever adds
a field there must say here how it shows.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest
from fastapi.testclient import TestClient
from openai.types import completion_create_params as openai_completion
from openai.types.chat import completion_create_params as openai_chat

from nano.checkpoint.hf_config import load_decoder_config
from nano.config import EngineConfig
from nano.engine.input_processor import InputProcessor
from nano.engine.tokenizer import Tokenizer
from nano.serve.app import create_app
from nano.serve.async_engine import AsyncEngine
from nano.serve.openai.body import StreamOptions
from nano.serve.openai.chat_body import ChatBody
from nano.serve.openai.completion_body import CompletionBody
from nano.serve.openai.parameters import Body, Parameter, State, parameters_of
from nano.serve.options import ServerOptions
from tests.serve.drafting import DraftingClient
from tests.serve.server import Server
from tests.tiny import BOS_TOKEN_ID, EOS_TOKEN_ID

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Once upon"}, {"role": "assistant", "content": "a time"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    CHAT: (ChatBody, {"messages": MESSAGES}),
    COMPLETIONS: (CompletionBody, {"prompt": PROMPT}),
}
# Greedy, and never ended by chance.
PLAIN = {"temperature": 0, "max_tokens": 8, "seed": 1, "logit_bias": {str(EOS_TOKEN_ID): -100}}
SAMPLED = {"temperature": 1}
STREAM = {"stream": True}
ENDS_AT_ONCE = {"logit_bias": {str(EOS_TOKEN_ID): 100}}
ONLY_A = {"allowed_token_ids": [65]}
CROWDED = {**SAMPLED, "allowed_token_ids": [*range(65, 73)], "max_tokens": 40}


@dataclass
class Answer:
    """A whole answer, or the chunks of a stream as one."""

    body: dict[str, Any]
    chunks: list[dict[str, Any]]

    @classmethod
    def of(cls, reply: httpx.Response) -> "Answer":
        assert reply.status_code == 200, reply.text
        if not reply.headers["content-type"].startswith("text/event-stream"):
            return cls(reply.json(), [])
        events = reply.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        return cls(chunks[-1], chunks)

    @property
    def choice(self) -> dict[str, Any]:
        choice: dict[str, Any] = self.body["choices"][0]
        return choice

    @property
    def text(self) -> str:
        choice = self.choice
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    @property
    def num_tokens(self) -> int:
        return int(self.body["usage"]["completion_tokens"])

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.body["usage"]["prompt_tokens"])

    @property
    def token_names(self) -> list[str]:
        logprobs = self.choice["logprobs"]
        if "tokens" in logprobs:
            return list(logprobs["tokens"])
        return [entry["token"] for entry in logprobs["content"]]


Check = Callable[[Answer, Answer], bool]


def differs(plain: Answer, given: Answer) -> bool:
    return given.text != plain.text


def names_by_id(plain: Answer, given: Answer) -> bool:
    return (plain.token_names, given.token_names) == (["A"] * 8, ["token_id:65"] * 8)


def sizes(answer: Answer) -> list[int]:
    counts = [len(chunk["choices"][0].get("token_ids") or ()) for chunk in answer.chunks]
    return [count for count in counts if count]


@dataclass
class Effect:
    """With `value` in the field, the answer to `beside` changes as `shows` says."""

    value: Any
    shows: Check = differs
    beside: dict[str, Any] = field(default_factory=dict)


SHARED_EFFECTS: dict[str, Effect] = {
    "model": Effect("other", lambda plain, given: given.body["model"] == "other"),
    "n": Effect(2, lambda plain, given: len(given.body["choices"]) == 2),
    "temperature": Effect(5.0),
    "top_p": Effect(1e-6, beside=SAMPLED),
    "top_k": Effect(1, beside=SAMPLED),
    "min_p": Effect(1.0, beside=SAMPLED),
    "seed": Effect(2, beside=SAMPLED),
    "presence_penalty": Effect(2.0, beside=CROWDED),
    "frequency_penalty": Effect(2.0, beside=CROWDED),
    "repetition_penalty": Effect(50.0, beside=CROWDED),
    "logit_bias": Effect({"66": 100}, lambda plain, given: given.text == "B" * 8),
    "allowed_token_ids": Effect([67], lambda plain, given: given.text == "C" * 8),
    "bad_words": Effect(
        ["A"], lambda plain, given: given.text == "B" * 8, {"allowed_token_ids": [65, 66]}
    ),
    "vllm_xargs": Effect({"script": [68] * 8}, lambda plain, given: given.text == "D" * 8),
    "max_tokens": Effect(3, lambda plain, given: given.num_tokens == 3),
    "min_tokens": Effect(
        4, lambda plain, given: (plain.num_tokens, given.num_tokens) == (1, 5), ENDS_AT_ONCE
    ),
    "stop": Effect("AA", lambda plain, given: given.text == "", ONLY_A),
    "stop_token_ids": Effect(
        [65], lambda plain, given: given.choice["finish_reason"] == "stop", ONLY_A
    ),
    "include_stop_str_in_output": Effect(
        True, lambda plain, given: given.text == "AA", {**ONLY_A, "stop": "AA"}
    ),
    "ignore_eos": Effect(True, lambda plain, given: given.num_tokens == 8, ENDS_AT_ONCE),
    "truncate_prompt_tokens": Effect(5, lambda plain, given: given.num_prompt_tokens == 5),
    "truncation_side": Effect(
        "right",
        lambda plain, given: (
            plain.num_prompt_tokens == given.num_prompt_tokens == 5 and differs(plain, given)
        ),
        {"truncate_prompt_tokens": 5},
    ),
    "skip_special_tokens": Effect(
        False,
        lambda plain, given: (plain.text, given.text) == ("", "<s>" * 8),
        {"allowed_token_ids": [BOS_TOKEN_ID]},
    ),
    "prompt_logprobs": Effect(
        1, lambda plain, given: '"prompt_logprobs"' in json.dumps(given.body)
    ),
    "return_token_ids": Effect(True, lambda plain, given: len(given.choice["token_ids"]) == 8),
    "stream": Effect(True, lambda plain, given: len(given.chunks) > 1),
    "stream_options": Effect(
        {"include_usage": True}, lambda plain, given: given.body["choices"] == [], STREAM
    ),
    "stream_interval": Effect(
        3,
        lambda plain, given: (
            all(size >= 3 for size in sizes(given)[1:-1]) and len(sizes(given)) <= 4
        ),
        {**STREAM, "return_token_ids": True, "max_tokens": 10, "speculative": {"enabled": False}},
    ),
    "request_id": Effect("mine", lambda plain, given: given.body["id"].endswith("-mine")),
    "speculative": Effect(
        {"enabled": False}, lambda plain, given: given.choice["speculative"]["methods"] == []
    ),
    "speculative_trace": Effect(
        True, lambda plain, given: len(given.choice["speculative_trace"]["sources"]) == 8
    ),
    "prediction": Effect(
        {"type": "content", "content": "A"},
        lambda plain, given: "completion_tokens_details" in given.body["usage"],
    ),
}
CHAT_EFFECTS = {
    "messages": Effect([{"role": "user", "content": "Other"}]),
    "add_special_tokens": Effect(
        True, lambda plain, given: given.num_prompt_tokens == plain.num_prompt_tokens + 1
    ),
    "max_completion_tokens": Effect(
        3, lambda plain, given: given.num_tokens == 3, {"max_tokens": None}
    ),
    "logprobs": Effect(True, lambda plain, given: len(given.token_names) == 8),
    "top_logprobs": Effect(
        2,
        lambda plain, given: len(given.choice["logprobs"]["content"][0]["top_logprobs"]) == 2,
        {"logprobs": True},
    ),
    "return_tokens_as_token_ids": Effect(True, names_by_id, {**ONLY_A, "logprobs": True}),
    "echo": Effect(True, lambda plain, given: given.text == "a time" + plain.text),
    "add_generation_prompt": Effect(
        False,
        lambda plain, given: (
            plain.num_prompt_tokens - given.num_prompt_tokens == len("[assistant]")
        ),
    ),
    "continue_final_message": Effect(
        True,
        lambda plain, given: (
            plain.num_prompt_tokens - given.num_prompt_tokens == len(";[assistant]")
        ),
    ),
    "chat_template": Effect(
        "{{ messages[0].content }}", lambda plain, given: given.num_prompt_tokens == 9
    ),
    "chat_template_kwargs": Effect(
        {"tone": "kind"},
        lambda plain, given: given.num_prompt_tokens == plain.num_prompt_tokens + len("(kind)"),
    ),
    "documents": Effect(
        [{"title": "Emma"}],
        lambda plain, given: given.num_prompt_tokens == plain.num_prompt_tokens + len("<Emma>"),
    ),
}
COMPLETION_EFFECTS = {
    "prompt": Effect("Other"),
    "add_special_tokens": Effect(
        False, lambda plain, given: given.num_prompt_tokens == plain.num_prompt_tokens - 1
    ),
    "echo": Effect(True, lambda plain, given: given.text == PROMPT + plain.text),
    "logprobs": Effect(2, lambda plain, given: len(given.token_names) == 8),
    "return_tokens_as_token_ids": Effect(True, names_by_id, {**ONLY_A, "logprobs": 0}),
}
# What the core is told, and no answer can show: attributes of its request.
TOLD: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "priority": (-3, lambda request: request.priority == -3),
    "cache_salt": ("mine", lambda request: request.cache_salt == "mine"),
    "timeout_ms": (5e5, lambda request: request.deadline is not None),
    "max_queue_ms": (5e5, lambda request: request.queue_deadline is not None),
}
EFFECTS = {
    CHAT: SHARED_EFFECTS | CHAT_EFFECTS,
    COMPLETIONS: SHARED_EFFECTS | COMPLETION_EFFECTS,
}
# Accepted values, and one that is not.
NEUTRAL: dict[str, tuple[list[Any], Any]] = {
    "user": (["me"], 5),
    "metadata": ([{}, {"a": "b"}], {"a": 1}),
    "prompt_cache_key": (["k"], 5),
    "safety_identifier": (["i"], 5),
    "store": ([False], True),
    "service_tier": (["auto", "default"], "flex"),
    "response_format": ([{"type": "text"}], {"type": "json_object"}),
    "spaces_between_special_tokens": ([True, False], "yes"),
    "use_beam_search": ([False], True),
    "best_of": ([1], 2),
    "tools": ([[]], [{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": (["none", "auto"], "required"),
    "parallel_tool_calls": ([True, False], "yes"),
    "functions": ([[]], [{"name": "f"}]),
    "function_call": (["none", "auto"], {"name": "f"}),
    "modalities": ([["text"]], ["audio"]),
    "reasoning_effort": (["none"], "high"),
    "include_reasoning": ([True], False),
    "verbosity": (["medium"], "low"),
    "prompt_cache_retention": (["in_memory"], "24h"),
}


def table(route: str, state: State) -> dict[str, Parameter]:
    rows = parameters_of(ROUTES[route][0])
    return {name: row for name, row in rows.items() if row.state is state}


def cases(state: State, leave_out: Any = ()) -> list[Any]:
    """(route, field) of every field in `state`."""
    return [
        pytest.param(route, name, id=f"{route.split('/')[2]}-{name}")
        for route in ROUTES
        for name in table(route, state)
        if name not in leave_out
    ]


def ask(server: Server, route: str, **fields: Any) -> Answer:
    return Answer.of(server.http.post(route, json={**ROUTES[route][1], **PLAIN, **fields}))


def refusal(server: Server, route: str, **fields: Any) -> dict[str, Any]:
    reply = server.http.post(route, json={**ROUTES[route][1], **PLAIN, **fields})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("route", "name"), cases(State.APPLIED, leave_out=TOLD))
def test_an_applied_field_shows_in_the_answer(chat_server: Server, route: str, name: str) -> None:
    effect = EFFECTS[route][name]
    plain = ask(chat_server, route, **effect.beside)
    given = ask(chat_server, route, **{**effect.beside, name: effect.value})
    assert effect.shows(plain, given)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", TOLD)
def test_an_applied_field_is_told_to_the_core(checkpoint: Path, route: str, name: str) -> None:
    core = DraftingClient()
    input_processor = InputProcessor(
        EngineConfig.from_args({"max_model_len": 512, "scheduling_policy": "priority"}),
        load_decoder_config(checkpoint),
        Tokenizer.from_folder(checkpoint),
        num_kv_slots=core.ready.num_kv_slots,
        proposers=core.ready.proposers,
    )
    value, is_told = TOLD[name]
    engine = AsyncEngine(core, input_processor)
    with TestClient(create_app(engine, ServerOptions(served_model_name=("tiny",)))) as http:
        for fields in ({}, {name: value}):
            reply = http.post(
                route, json={**ROUTES[route][1], "max_tokens": 1, "seed": 0, **fields}
            )
            assert reply.status_code == 200, reply.text
            assert is_told(core.requests[-1]) == bool(fields)


@pytest.mark.parametrize(("route", "name"), cases(State.NEUTRAL))
def test_a_neutral_field_changes_nothing(chat_server: Server, route: str, name: str) -> None:
    accepted, other = NEUTRAL[name]
    plain = ask(chat_server, route).body["choices"]
    for value in (None, *accepted):
        assert ask(chat_server, route, **{name: value}).body["choices"] == plain
    error = refusal(chat_server, route, **{name: other})
    assert error["param"] == name
    assert (table(route, State.NEUTRAL)[name].reason or "") in error["message"]


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"store": 0}),
        (CHAT, {"store": 0.0}),
        (CHAT, {"include_reasoning": 1}),
        (COMPLETIONS, {"use_beam_search": 0}),
        (COMPLETIONS, {"best_of": True}),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": 0.0}}),
    ],
    ids=str,
)
def test_no_number_stands_for_a_boolean_nor_a_boolean_for_a_number(
    chat_server: Server, route: str, fields: dict[str, Any]
) -> None:
    error = refusal(chat_server, route, **fields)
    assert error["param"].startswith(list(fields)[-1])


@pytest.mark.parametrize(("route", "name"), cases(State.REFUSED))
def test_a_refused_field_is_refused_with_its_reason(
    chat_server: Server, route: str, name: str
) -> None:
    reason = table(route, State.REFUSED)[name].reason
    assert reason is not None
    for value in (True, 1, "x", [], {}):
        error = refusal(chat_server, route, **{name: value})
        assert error["param"] == name
        assert error["message"] == f"{name}: {reason}; accepted: null"
    assert ask(chat_server, route, **{name: None}).num_tokens == 8


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_field_is_refused_by_name(chat_server: Server, route: str) -> None:
    for value in (None, 1):
        error = refusal(chat_server, route, temprature=value)
        assert error["param"] == "temprature"
        assert error["message"] == "unknown parameter 'temprature'"


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_the_table_is_tested(route: str) -> None:
    applied = {*EFFECTS[route], *TOLD}
    assert applied == table(route, State.APPLIED).keys()
    assert table(route, State.NEUTRAL).keys() <= NEUTRAL.keys()
    assert all(row.accepts for row in parameters_of(ROUTES[route][0]).values())


VLLM = """
top_k min_p repetition_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_special_tokens
structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
return_token_offsets cache_salt vllm_xargs repetition_detection thinking_token_budget
stream_interval kv_transfer_params
""".split()
VLLM_CHAT = """
add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
include_reasoning return_prompt_text
""".split()


def test_the_table_knows_every_field_of_openai_and_vllm() -> None:
    chat = get_type_hints(openai_chat.CompletionCreateParamsStreaming).keys()
    completion = get_type_hints(openai_completion.CompletionCreateParamsStreaming).keys()
    assert {*chat, *VLLM, *VLLM_CHAT} <= ChatBody.model_fields.keys()
    assert {*completion, *VLLM} <= CompletionBody.model_fields.keys()


def test_a_type_that_admits_nothing_is_a_refused_field_and_no_other() -> None:
    for body, _ in ROUTES.values():
        for name, row in parameters_of(body).items():
            admits_null_only = body.model_fields[name].annotation is type(None)
            assert admits_null_only == (row.state is State.REFUSED), name
            assert (
                admits_null_only
                or type(None) in get_args(body.model_fields[name].annotation)
                or (name in ("messages", "prompt"))
            ), name


class TestStreamOptions:
    @pytest.mark.parametrize("route", ROUTES)
    def test_continuous_usage_grows_from_chunk_to_chunk(
        self, chat_server: Server, route: str
    ) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        fields = {"stream": True, "return_token_ids": True, "n": 2, **SAMPLED}
        answer = ask(chat_server, route, stream_options=options, **fields)
        num_tokens = 0
        for chunk in answer.chunks:
            for choice in chunk["choices"]:
                num_tokens += len(choice.get("token_ids") or ())
            assert chunk["usage"]["completion_tokens"] == num_tokens
            assert chunk["usage"]["prompt_tokens"] == answer.num_prompt_tokens
        assert num_tokens == 16
        whole = ask(chat_server, route, n=2, **SAMPLED).body["usage"]
        assert answer.body["usage"]["total_tokens"] == whole["total_tokens"]

    @pytest.mark.parametrize("route", ROUTES)
    def test_options_that_would_do_nothing_are_refused(
        self, chat_server: Server, route: str
    ) -> None:
        for fields in (
            {"stream_options": {"include_usage": True}},
            {"stream_options": {"continuous_usage_stats": True}, "stream": True},
            {"stream_options": {"include_obfuscation": True}, "stream": True},
            {"stream_options": {"other": True}, "stream": True},
        ):
            assert refusal(chat_server, route, **fields)["param"] == "stream_options"

    def test_every_option_is_in_the_table(self) -> None:
        states = {name: row.state.value for name, row in parameters_of(StreamOptions).items()}
        assert states == {
            "include_usage": "applied",
            "continuous_usage_stats": "applied",
            "include_obfuscation": "neutral",
        }


@pytest.mark.parametrize("route", ROUTES)
class TestCombinations:
    def test_truncation_keeps_bos_and_the_end_of_a_prompt(
        self, chat_server: Server, route: str
    ) -> None:
        fields = {"return_token_ids": True, "prompt_logprobs": 0}
        whole = ask(chat_server, route, **fields)
        cut = ask(chat_server, route, truncate_prompt_tokens=4, **fields)
        ids, cut_ids = (
            answer.body.get("prompt_token_ids") or answer.choice["prompt_token_ids"]
            for answer in (whole, cut)
        )
        if route == COMPLETIONS:  # BOS belongs around the text; a template writes it into the text
            assert cut_ids == [BOS_TOKEN_ID, *ids[-3:]]
        else:
            assert cut_ids == ids[-4:]
        assert cut.num_prompt_tokens == 4

    def test_minus_one_truncates_to_what_leaves_room_for_the_answer(
        self, chat_server: Server, route: str
    ) -> None:
        long = "x" * 1000
        body = (
            {"prompt": long}
            if route == COMPLETIONS
            else {"messages": [{"role": "user", "content": long}]}
        )
        assert refusal(chat_server, route, **body)["code"] == "context_length_exceeded"
        answer = ask(chat_server, route, truncate_prompt_tokens=-1, **body)
        assert (answer.num_prompt_tokens, answer.num_tokens) == (504, 8)
        error = refusal(chat_server, route, truncate_prompt_tokens=-1, max_tokens=512, **body)
        assert error["param"] == "truncate_prompt_tokens"

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
            ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
            ("truncation_side", {"truncation_side": "left"}),
            ("truncation_side", {"truncation_side": "middle", "truncate_prompt_tokens": 5}),
            ("stream_interval", {"stream_interval": 0, "stream": True}),
            ("stream_interval", {"stream_interval": 2}),
            ("timeout_ms", {"timeout_ms": 0}),
            ("timeout_ms", {"timeout_ms": "1"}),
            ("max_queue_ms", {"max_queue_ms": -5}),
            ("request_id", {"request_id": ""}),
            ("request_id", {"request_id": "two words"}),
            ("request_id", {"request_id": "x" * 513}),
            ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
            ("model", {"model": 5}),
        ],
    )
    def test_a_value_outside_the_limits_is_refused_by_name(
        self, chat_server: Server, route: str, name: str, fields: dict[str, Any]
    ) -> None:
        error = refusal(chat_server, route, **fields)
        assert error["param"] == name
        assert name in error["message"]

    def test_request_ids_of_header_and_body_agree_or_are_refused(
        self, chat_server: Server, route: str
    ) -> None:
        body = {**ROUTES[route][1], **PLAIN}

        def call(header: str | None, own: str | None) -> httpx.Response:
            headers = {} if header is None else {"X-Request-Id": header}
            return chat_server.http.post(route, json={**body, "request_id": own}, headers=headers)

        for header, own in (("a", None), (None, "a"), ("a", "a")):
            reply = call(header, own)
            assert reply.headers["x-request-id"] == "a"
            assert reply.json()["id"].endswith("-a")
        assert call("a", "b").json()["error"]["param"] == "request_id"
        generated = call(None, None)
        assert generated.json()["id"].endswith("-" + generated.headers["x-request-id"])

    def test_a_stream_adds_up_to_the_whole_answer(self, chat_server: Server, route: str) -> None:
        """Half characters, hidden tokens, stop strings: text, token ids and logprobs agree."""
        fields: dict[str, Any] = {
            "temperature": 1,
            "max_tokens": 60,
            "n": 2,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logit_bias": {str(i): 3 for i in (*"é🫠".encode(), BOS_TOKEN_ID)},
            "stop": ["é🫠", "aa"],
            "logprobs": 2 if route == COMPLETIONS else True,
        }
        if route == CHAT:
            fields["top_logprobs"] = 2
        for seed in range(4):
            whole = ask(chat_server, route, seed=seed, **fields).body
            stream = ask(chat_server, route, seed=seed, stream=True, **fields)
            for choice in whole["choices"]:
                parts = [
                    chunk["choices"][0]
                    for chunk in stream.chunks
                    if chunk["choices"][0]["index"] == choice["index"]
                ]
                assert joined(parts) == joined([as_part(choice)])
                assert [p["finish_reason"] for p in parts if p["finish_reason"]] == [
                    choice["finish_reason"]
                ]


def as_part(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "delta": choice.get("message")} if "message" in choice else choice


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all parts of a choice say together."""
    texts = [part["delta"].get("content") if "delta" in part else part["text"] for part in parts]
    whole: dict[str, Any] = {"text": "".join(text or "" for text in texts)}
    whole["token_ids"] = [i for part in parts for i in part.get("token_ids") or ()]
    for part in parts:
        for name, entries in (part["logprobs"] or {}).items():
            whole[name] = whole.get(name, []) + (entries or [])
    return whole
