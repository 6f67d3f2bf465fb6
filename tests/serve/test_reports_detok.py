"""What users of other engines reported about the text of answers over HTTP (ids like B070).

Answers are scripted, token by token, and asked for whole and as a stream. In `chat_server` a token
is a byte; in `words_server` it is a piece of a word, or a byte of what is in no word.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

from tests.serve.both_ways import CHAT, COMPLETIONS, ROUTES, ask, ask_one
from tests.serve.scrape import scrape
from tests.serve.server import Server
from tests.serve.words import byte_ids, word_ids
from tests.tiny import BOS_TOKEN_ID, EOS_TOKEN_ID

EMOJI = "\U0001fae0"
REPLACEMENT = "\ufffd"
LEAD, TRAIL = "é".encode()
FOX = "The quick brown fox"

routes = pytest.mark.parametrize(("route", "body"), ROUTES, ids=["completions", "chat"])


def scripted(script: str | bytes | list[int], **fields: Any) -> dict[str, Any]:
    """The fields of a call that is answered with `script`, and no further."""
    ids = [*(script.encode() if isinstance(script, str) else script)]
    return {"vllm_xargs": {"script": ids}, "max_tokens": len(ids), "temperature": 0, **fields}


def is_made_of(pieces: list[str], parts: Sequence[str]) -> bool:
    """Whether each piece is one part or several: a slow reader gets them joined."""
    return {*accumulate(pieces)} <= {*accumulate(parts)}


@routes
def test_a_character_of_several_tokens_comes_in_one_piece(
    chat_server: Server, words_server: Server, route: str, body: dict[str, Any]
) -> None:  # B070
    text = f"{EMOJI} {EMOJI * 2}é日本 👩‍👧"
    for server, script in ((chat_server, [*text.encode()]), (words_server, byte_ids(text))):
        choice = ask_one(server, route, {**body, **scripted(script)})
        assert choice.text == text
        assert is_made_of(choice.pieces, text)
        assert choice.token_ids == script


@routes
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_character_that_is_cut_off_is_one_replacement(
    chat_server: Server, route: str, body: dict[str, Any], num_bytes: int
) -> None:  # B073
    begun = [65, *EMOJI.encode()[:num_bytes]]
    for script, ending, num_tokens in (
        (scripted(begun), ("length", None), len(begun)),
        (scripted([*begun, EOS_TOKEN_ID]), ("stop", None), len(begun) + 1),
        (scripted([*begun, 66], stop_token_ids=[66]), ("stop", 66), len(begun) + 1),
    ):
        choice = ask_one(chat_server, route, {**body, **script})
        assert choice.text == "A" + REPLACEMENT
        assert choice.ending == ending
        assert len(choice.token_ids) == num_tokens
    behind = ask_one(chat_server, route, {**body, **scripted([*begun, 66])}, stop="B")
    assert (behind.text, behind.ending) == ("A" + REPLACEMENT, ("stop", "B"))


@pytest.mark.parametrize(
    ("script", "text"),
    [([TRAIL, 66], "éB"), ([66], "B"), ([LEAD, TRAIL], "é"), ([EOS_TOKEN_ID], "")],
)
def test_what_a_prompt_leaves_unfinished_is_completed_or_stays_with_the_prompt(
    chat_server: Server, script: list[int], text: str
) -> None:  # B073, B077
    body = {"prompt": [65, LEAD], **scripted(script)}
    assert ask_one(chat_server, COMPLETIONS, body).text == text
    echoed = ask_one(chat_server, COMPLETIONS, body, echo=True, logprobs=0)
    assert echoed.text == "A" + REPLACEMENT + text
    assert [offset for *_, offset in echoed.logprobs][:3] == [0, 1, 2]


@pytest.mark.parametrize("prompt", ["a<s>b", "<s>a", [BOS_TOKEN_ID, 65, LEAD]])
def test_offsets_point_at_the_tokens_around_broken_characters_and_special_tokens(
    chat_server: Server, prompt: Any
) -> None:  # B073; chat_server puts a BOS before texts that the caller does not see
    script = [LEAD, 88, LEAD, LEAD, TRAIL, 89, 0xFF, BOS_TOKEN_ID, LEAD, 90]
    body = {"prompt": prompt, **scripted(script, logprobs=0)}
    for fields in ({}, {"echo": True}, {"echo": True, "skip_special_tokens": False}):
        choice = ask_one(chat_server, COMPLETIONS, body, **fields)
        assert choice.text.endswith("Z")
        shown = [(token, offset) for token, *_, offset in choice.logprobs if len(token) == 1]
        for token, offset in shown:
            assert choice.text[offset] == token or token == REPLACEMENT
        assert [offset for *_, offset in choice.logprobs] == sorted(
            offset for *_, offset in choice.logprobs
        )


@routes
def test_a_stop_string_over_several_tokens_never_begins_to_show(
    chat_server: Server, route: str, body: dict[str, Any]
) -> None:  # B074
    body = {**body, **scripted(FOX + " jumps")}
    choice = ask_one(chat_server, route, body, stop=["own fox"])
    assert choice.text == "The quick br"
    assert is_made_of(choice.pieces, choice.text)
    assert choice.ending == ("stop", "own fox")
    assert bytes(choice.token_ids).decode() == FOX
    # The text's first match is the end, though another began before it.
    several = ["quick brown fox jumps over", "ick b", "row", "own fox"]
    assert ask_one(chat_server, route, body, stop=several).ending == ("stop", "ick b")
    lines = ask_one(chat_server, route, {**body, **scripted("a\nb\n\nc")}, stop="\n\n")
    assert (lines.text, lines.ending) == ("a\nb", ("stop", "\n\n"))


@routes
def test_text_is_held_back_only_while_it_may_become_a_stop_string(
    chat_server: Server, route: str, body: dict[str, Any]
) -> None:  # B074
    body = {**body, **scripted("brow owns aaab")}
    choice = ask_one(chat_server, route, body, stop=["own fox", "aab"])
    assert is_made_of(choice.pieces, ["b", "r", "ow", " ", "own", "s", " ", "a"])
    assert choice.text == "brow owns a"
    assert choice.ending == ("stop", "aab")
    at_the_end = ask_one(chat_server, route, {**body, **scripted("brown fo")}, stop="own fox")
    assert is_made_of(at_the_end.pieces, ["b", "r", "own fo"])
    assert at_the_end.text == "brown fo"
    assert at_the_end.ending == ("length", None)


@routes
@pytest.mark.parametrize("is_shown", [False, True])
def test_a_token_that_goes_on_behind_the_stop_string_is_cut(
    words_server: Server, route: str, body: dict[str, Any], is_shown: bool
) -> None:  # B076
    body = {**body, **scripted(word_ids("▁the", "▁Paris", "▁and", "▁Paris"))}
    body |= {"logprobs": True} if route == CHAT else {"logprobs": 0}
    for stop, end, first in (("ar", " the P", "ar"), (["and", "is", "ri"], " the Pa", "ri")):
        choice = ask_one(words_server, route, body, stop=stop, include_stop_str_in_output=is_shown)
        text = end + first if is_shown else end
        # Nothing is in front of the answer in a completion; a chat's prompt is not shown.
        assert choice.text == text
        assert choice.ending == ("stop", first)
        assert choice.token_ids == word_ids("▁the", "▁Paris")
        assert len(choice.logprobs) == 2


@pytest.mark.parametrize(("prompt", "text"), [("the", " Paris is"), ("the ", " Paris is")])
def test_the_space_in_front_of_the_first_word_is_kept(
    words_server: Server, prompt: str, text: str
) -> None:  # B077
    script = scripted(word_ids("▁Paris", "▁is"))
    body = {"prompt": prompt, **script}
    assert ask_one(words_server, COMPLETIONS, body).text == text
    assert ask_one(words_server, COMPLETIONS, body, echo=True).text == prompt + text
    chat = {"messages": [{"role": "user", "content": prompt}], **script}
    assert ask_one(words_server, CHAT, chat).text == text


FORCED = {"logit_bias": {str(EOS_TOKEN_ID): 100}}
ENDINGS: dict[str, tuple[dict[str, Any], tuple[str, Any], int, str]] = {
    "one": (scripted("A"), ("length", None), 1, "A"),
    "five": (scripted("ABCDE"), ("length", None), 5, "ABCDE"),
    "the end as the last that is allowed": (
        {"temperature": 0, "max_tokens": 1, **FORCED},
        ("stop", None),
        1,
        "",
    ),
    "the end": (scripted([65, EOS_TOKEN_ID, 66]), ("stop", None), 2, "A"),
    "the end, shown": (
        scripted([65, EOS_TOKEN_ID], skip_special_tokens=False, include_stop_str_in_output=True),
        ("stop", None),
        2,
        "A</s>",
    ),
    "the end, ignored": (
        scripted([65, EOS_TOKEN_ID, 66], ignore_eos=True, skip_special_tokens=False),
        ("length", None),
        3,
        "A</s>B",
    ),
    "the end, ignored, as a stop string": (
        scripted([65, EOS_TOKEN_ID], ignore_eos=True, skip_special_tokens=False, stop="</s>"),
        ("stop", "</s>"),
        2,
        "A",
    ),
    "the end, ignored, as a stop token": (
        scripted([65, EOS_TOKEN_ID], ignore_eos=True, stop_token_ids=[EOS_TOKEN_ID]),
        ("stop", EOS_TOKEN_ID),
        2,
        "A",
    ),
    "a stop string as the last": (scripted("ABC", stop="BC"), ("stop", "BC"), 3, "A"),
    "a stop token as the last": (scripted("ABC", stop_token_ids=[67]), ("stop", 67), 3, "AB"),
}


@routes
@pytest.mark.parametrize("name", ENDINGS)
def test_an_ending_has_its_reason_and_every_token_counts_once(
    chat_server: Server, route: str, body: dict[str, Any], name: str
) -> None:  # B080
    fields, ending, num_tokens, text = ENDINGS[name]
    counter = "generation_tokens_total"
    before = scrape(chat_server.http).get(counter, 0)
    (choice,), usage = ask(chat_server, route, {**body, **fields})
    assert (choice.text, choice.ending) == (text, ending)
    assert usage["completion_tokens"] == num_tokens
    assert scrape(chat_server.http)[counter] == before + 2 * num_tokens  # whole and streamed


def test_an_answer_that_fills_the_context_ends_with_length(words_server: Server) -> None:  # B080
    body = {"prompt": [5] * 508, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    choice = ask_one(words_server, COMPLETIONS, body)
    assert (choice.ending, len(choice.token_ids)) == (("length", None), 4)
