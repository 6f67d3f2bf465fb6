"""What users of other engines reported about sampling over HTTP (ids like B058).

More of what is refused (B061, B065) is in test_app.py, and the arithmetic of each parameter in
tests/sampling and tests/test_llm.py.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.serve.both_ways import CHAT, COMPLETIONS, HELLO, ROUTES, ask, ask_one, post, stream
from tests.serve.server import Server
from tests.serve.words import NAN_TOKEN_ID, word_ids
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE

routes = pytest.mark.parametrize(("route", "body"), ROUTES, ids=["completions", "chat"])

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 1, "max_tokens": 12, "seed": 7, "ignore_eos": True}
A, B = b"AB"
COMPUTABLE: dict[str, Any] = {"logit_bias": {str(NAN_TOKEN_ID): -100}}


def texts(server: Server, route: str, body: dict[str, Any], **fields: Any) -> list[str]:
    return [choice.text for choice in ask(server, route, body, **fields)[0]]


# --- log probabilities ---------------------------------------------------------------------------


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@routes
@pytest.mark.parametrize(
    "fields", [{"top_k": 1}, {"top_p": 0.01}, {"allowed_token_ids": [5]}, {"bad_words": ["the"]}]
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_logprob_of_what_cannot_be_sampled_is_a_number(
    words_server: Server,
    route: str,
    body: dict[str, Any],
    fields: dict[str, Any],
    is_streamed: bool,
) -> None:  # B054: this server tells log probabilities after the parameters, where it is -inf
    wish: dict[str, Any] = {"logprobs": 20, "echo": True}
    if route == CHAT:
        wish = {"logprobs": True, "top_logprobs": 20}
    wish |= {"stream": is_streamed, "max_tokens": 2, "seed": 1, **COMPUTABLE, **fields}
    reply = words_server.http.post(route, json={**body, **wish})
    assert reply.status_code == 200
    for line in reply.text.splitlines():
        if line and line != "data: [DONE]":
            json.loads(line.removeprefix("data: "), parse_constant=refuse)
    assert ("-9999.0" in reply.text) == (fields != {"bad_words": ["the"]})


@routes
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5, "top_k": 1},
        {"temperature": 2, "top_p": 1e-6},
        {"temperature": 2, "min_p": 1},
        {"presence_penalty": 2, "frequency_penalty": 2},
        {"repetition_penalty": 1.5},
        {"logit_bias": {str(EOS_TOKEN_ID): -100}},
        {"min_tokens": 1, "ignore_eos": False},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_logprobs_are_the_models_whatever_is_done_to_sample(
    server: Server, route: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:  # B064
    wish = {"logprobs": 5} if route == COMPLETIONS else {"logprobs": True, "top_logprobs": 5}
    body = {**body, **GREEDY, **wish, "max_tokens": 1}
    plain = ask_one(server, route, body)
    assert len(plain.logprobs) == 1
    # The same token, so that it can be compared.
    body["allowed_token_ids"] = plain.token_ids
    assert ask_one(server, route, {**body, **fields}).logprobs == plain.logprobs


# --- parameters at their limits ------------------------------------------------------------------


@routes
def test_a_vanishing_temperature_is_greedy_and_a_neighbour_is_not(
    server: Server, route: str, body: dict[str, Any]
) -> None:  # B056
    greedy, sampled = ({**body, **fields} for fields in (GREEDY, SAMPLED))
    expected, neighbour = texts(server, route, greedy), texts(server, route, sampled)
    assert expected != neighbour
    temperatures = [1e-4, 1e-5, 9.99e-6, 1e-8, 1e-20, 5e-324, -0.0]
    calls = [{**body, **SAMPLED, "temperature": temperature} for temperature in temperatures]
    with ThreadPoolExecutor(4) as pool:
        got = [*pool.map(lambda call: texts(server, route, call), [*calls, sampled])]
    assert got == [*[expected] * len(calls), neighbour]


@routes
def test_every_spelling_of_no_top_k_means_the_same(
    server: Server, route: str, body: dict[str, Any]
) -> None:  # B058
    body = {**body, **SAMPLED, "n": 8}
    plain = texts(server, route, body)
    for top_k in (-1, 0, VOCAB_SIZE, VOCAB_SIZE + 1, 10**6, None):
        assert texts(server, route, body, top_k=top_k) == plain
    assert texts(server, route, body, top_k=2) != plain
    (greedy,) = {*texts(server, route, body, top_k=1)}
    assert greedy == texts(server, route, {**body, "n": 1}, temperature=0)[0]


BAD: list[tuple[str, str]] = [  # as JSON
    ("repetition_penalty", "-1"),
    ("temperature", "1e309"),
    ("temperature", "true"),
    ("top_k", "1.5"),
    ("top_k", "4294967296"),
    ("n", "1000000"),
    ("max_tokens", str(2**63)),
    ("frequency_penalty", "5"),
    ("min_p", "2"),
    ("seed", str(2**70)),
    ("seed", "1.0"),
    ("stop", '[""]'),
    ("stop", json.dumps([str(index) for index in range(10_000)])),
    ("bad_words", '["", "\\u0007", " the"]'),
    ("logit_bias", '{"5": null}'),
    ("logit_bias", '{"5": "1"}'),
    ("logit_bias", '{"5": 100, "05": -100}'),
    ("logit_bias", '{"5.0": 1}'),
    ("logit_bias", '{"49152": 5}'),
    ("prompt_logprobs", "1000000"),
]


@routes
@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda given: given[:24])
def test_a_value_out_of_range_is_refused_by_name_and_the_next_call_works(
    server: Server, route: str, body: dict[str, Any], name: str, value: str
) -> None:  # B058, B061, B065, B067
    content = f'{json.dumps(body)[:-1]}, "{name}": {value}}}'
    reply = server.http.post(route, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == name
    assert name in error["message"]
    assert len(error["message"]) < 300
    assert post(server, route, body, max_tokens=1)["usage"]["completion_tokens"] == 1


@routes
def test_a_bias_of_a_hundred_forces_a_token_and_of_minus_a_hundred_bans_it(
    server: Server, route: str, body: dict[str, Any]
) -> None:  # B065
    body = {**body, **SAMPLED, "n": 3}
    assert texts(server, route, body, logit_bias={str(A): 100}) == ["A" * 12] * 3
    # All but two of the vocabulary, so that one of these would come if it were not banned.
    others = {str(i): -100 for i in range(VOCAB_SIZE) if i not in (A, B)}
    assert {*"".join(texts(server, route, body, logit_bias=others))} == {"A", "B"}
    others[str(B)] = -100
    assert texts(server, route, body, logit_bias=others) == ["A" * 12] * 3
    assert texts(server, route, body, logit_bias={}) == texts(server, route, body)


@routes
def test_presence_and_frequency_count_what_was_generated_and_not_the_prompt(
    server: Server, route: str, body: dict[str, Any]
) -> None:  # B060
    other = {A: B, B: A}
    limits = {**GREEDY, "max_tokens": 16, "allowed_token_ids": [A, B]}
    for name, bound in (("frequency_penalty", 2), ("presence_penalty", 2)):
        for letter in (A, B):
            said = chr(letter) * 20
            messages = [{"role": "user", "content": said}]
            prompt = {"prompt": said} if route == COMPLETIONS else {"messages": messages}
            plain = ask_one(server, route, {**prompt, **limits})
            penalised = ask_one(server, route, {**prompt, **limits}, **{name: bound})
            # If the prompt's twenty counted, the letter that is not in it would win by far.
            assert penalised.token_ids[0] == plain.token_ids[0]
            if name == "frequency_penalty":
                assert other[plain.token_ids[0]] in penalised.token_ids


def test_a_bad_word_comes_neither_with_its_space_nor_without_and_its_parts_may(
    words_server: Server,
) -> None:  # B067
    # "the" is t + he inside a word, ▁the after a space.
    the, t, he, a, eos = word_ids("▁the", "t", "he", "▁a", "</s>")
    body = {"prompt": "is", "n": 8, "temperature": 100, "seed": 1, "max_tokens": 40}
    body |= {"allowed_token_ids": [the, t, he, a], "logit_bias": {str(eos): -100}}

    def seen(**fields: Any) -> tuple[int, int, set[int]]:
        choices, _ = ask(words_server, COMPLETIONS, body, **fields)
        runs = [choice.token_ids for choice in choices]
        pairs = [pair for run in runs for pair in pairwise(run)]
        return sum(run.count(the) for run in runs), pairs.count((t, he)), set().union(*runs)

    num_spaced, num_bare, tokens = seen()
    assert num_spaced > 0
    assert num_bare > 0
    for word in ("the", " the"):
        assert seen(bad_words=[word]) == (0, 0, tokens - {the})


# --- several choices -----------------------------------------------------------------------------

SEVERAL = [
    (COMPLETIONS, {"prompt": ["x" * 40, "y" * 17], "n": 4}, 57),
    (COMPLETIONS, {"prompt": "x" * 40, "n": 4, "echo": True}, 40),
    (CHAT, {"messages": HELLO, "n": 4}, None),
]


@pytest.mark.parametrize(("route", "body", "num_prompt_tokens"), SEVERAL)
def test_choices_of_one_seed_differ_repeat_and_end_each_on_its_own(
    server: Server, route: str, body: dict[str, Any], num_prompt_tokens: int | None
) -> None:  # B063; `ask` compares the stream with the whole, choice by choice
    limits: dict[str, Any] = {"temperature": 5, "seed": 5, "max_tokens": 30, "stop": ["."]}
    limits |= {"allowed_token_ids": [46, 97, 98, 99]}
    choices, usage = ask(server, route, body, **limits)
    again, _ = ask(server, route, body, **limits)
    told = [(choice.text, choice.ending) for choice in choices]
    assert told == [(choice.text, choice.ending) for choice in again]
    assert len({choice.text for choice in choices}) > len(choices) / 2
    endings = {choice.ending for choice in choices}
    assert ("stop", ".") in endings
    assert len({len(choice.token_ids) for choice in choices}) > 1
    if num_prompt_tokens is not None:
        assert usage["prompt_tokens"] == num_prompt_tokens
    limits["temperature"] = 0
    greedy, _ = ask(server, route, body, **limits)
    num_prompts = len(greedy) // 4
    for index in range(num_prompts):
        assert len({choice.text for choice in greedy[4 * index : 4 * index + 4]}) == 1


# --- logits that are not numbers -----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_numbers_end_their_request_alone_and_not_its_connection(
    words_server: Server, temperature: int
) -> None:  # B069
    fine = {"prompt": "the Paris is", "temperature": temperature, "seed": 1, "max_tokens": 24}
    fine |= COMPUTABLE
    at_once = {**fine, "prompt": [5, NAN_TOKEN_ID, 6]}
    later = {**fine, "vllm_xargs": {"script": [*b"after", NAN_TOKEN_ID]}}
    expected = post(words_server, COMPLETIONS, fine)["choices"]

    def call(body: dict[str, Any]) -> httpx.Response:
        return words_server.http.post(COMPLETIONS, json=body)

    with ThreadPoolExecutor(4) as pool:
        replies = [*pool.map(call, [fine, at_once, later, fine, at_once, fine])]
    for index, reply in enumerate(replies):
        if index in (0, 3, 5):
            assert reply.json()["choices"] == expected
            continue
        assert reply.status_code == 500
        error = reply.json()["error"]
        assert error["type"] == "server_error"
        assert "not numbers" in error["message"]

    with httpx.Client(base_url=words_server.url, timeout=60) as http:
        addresses = set()
        for body in (at_once, fine, later, fine):
            reply = http.post(COMPLETIONS, json=body)
            network = reply.extensions["network_stream"]
            addresses.add(network.get_extra_info("client_addr"))
        assert len(addresses) == 1


def test_a_stream_whose_logits_are_not_numbers_ends_with_the_error(
    words_server: Server,
) -> None:  # B069
    script = {"script": [*word_ids("▁the", "▁Paris"), NAN_TOKEN_ID]}
    body = {"prompt": "is", "n": 2, "max_tokens": 9, "vllm_xargs": script}
    reply = words_server.http.post(COMPLETIONS, json={**body, "stream": True})
    *events, last = [json.loads(e.removeprefix("data: ")) for e in reply.text.split("\n\n") if e]
    assert "not numbers" in last["error"]["message"]
    told = ["", ""]
    for event in events:
        (choice,) = event["choices"]
        told[choice["index"]] += choice["text"]
        assert choice["finish_reason"] is None
    assert told[0].startswith(" the Paris")
    assert stream(words_server, COMPLETIONS, {"prompt": "is", "max_tokens": 2, **COMPUTABLE})
