import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano.engine.detokenizer import IncrementalDetokenizer
from nano.engine.stop_strings import StopChecker, StopMatch
from nano.engine.tokenizer import Tokenizer
from tests.vocabularies import (
    byte_tokenizer,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
)

EMOJI = "\U0001fae0"


def deltas(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.step(token_id) for token_id in output), detokenizer.flush()]


@given(st.lists(st.integers(0, 260), max_size=40), st.booleans())
def test_deltas_joined_equal_the_whole_decode(output: list[int], skip: bool) -> None:  # B070
    tokenizer = byte_tokenizer()
    joined = "".join(deltas(tokenizer, list(b"prompt"), output, skip))
    assert joined == tokenizer.decode(output, skip)


@given(
    st.lists(st.sampled_from([*EMOJI.encode(), *b"a", 0xFF, 256]), max_size=8),
    st.lists(st.sampled_from([*EMOJI.encode(), *b"a", 0xFF, 256]), max_size=12),
)
def test_a_character_begun_by_the_prompt_is_completed_or_left_to_it(
    prompt: list[int], output: list[int]
) -> None:
    tokenizer = byte_tokenizer()
    added = "".join(deltas(tokenizer, prompt, output))
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *output])
    if not whole.startswith(before):
        before = before.removesuffix("\ufffd")  # completed
    assert before + added == whole


@given(st.lists(st.sampled_from([*EMOJI.encode(), *b"a", 0xFF, 256]), max_size=12))
def test_a_settled_token_gives_its_own_characters_only(output: list[int]) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, [], True)
    text = ""
    for token_id in output:
        text += detokenizer.settle(token_id)
        own = detokenizer.step(token_id)
        assert token_id != ord("a") or own == "a"
        text += own
    assert text + detokenizer.flush() == tokenizer.decode(output)


def test_random_smollm2_ids_join_to_the_whole_decode() -> None:  # B070
    tokenizer = smollm2_tokenizer()
    rng = random.Random(1)
    for _ in range(200):
        prompt, output = ([rng.randrange(tokenizer.vocab_size) for _ in range(20)] for _ in "ab")
        prompt = tokenizer.encode("begin") if rng.random() < 0.5 else [*prompt, 33]
        assert "".join(deltas(tokenizer, prompt, output)) == tokenizer.decode(output)


@pytest.mark.parametrize("text", ["the Paris,  is", "€😀the", "\n\n the", "a" + EMOJI * 3 + " and"])
def test_sentencepiece_deltas_continue_the_prompt(text: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    prompt = tokenizer.encode("is")
    output = tokenizer.encode_fragment(text)
    assert "".join(deltas(tokenizer, prompt, output)) == text
    assert tokenizer.decode([*prompt, *output]) == "is" + text


def test_the_leading_space_of_the_first_token_is_kept() -> None:  # B077
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    tokenizer = sentencepiece_tokenizer()
    paris = [tokens.index("▁Paris")]
    assert deltas(tokenizer, tokenizer.encode("the"), paris) == [" Paris", ""]
    assert deltas(smollm2_tokenizer(), [5], smollm2_tokenizer().encode(" Paris"))[0] == " Paris"


def test_text_right_after_bos_has_no_dummy_space() -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    paris = [tokens.index("▁Paris")]
    bos = [tokens.index("<s>")]
    assert deltas(sentencepiece_tokenizer(), bos, paris)[0] == "Paris"
    assert deltas(sentencepiece_tokenizer(), bos, paris, skip=False)[0] == " Paris"


def test_a_split_character_arrives_whole() -> None:  # B070
    output = list(EMOJI.encode())
    assert deltas(byte_tokenizer(), [65], output) == ["", "", "", EMOJI, ""]


def test_special_tokens_inside_a_character_do_not_break_it() -> None:
    first, *rest = EMOJI.encode()
    assert "".join(deltas(byte_tokenizer(), [65], [first, 256, *rest])) == EMOJI


def test_bytes_pending_at_the_end_are_one_replacement_character() -> None:  # B073
    for count in (1, 2, 3):
        output = list(EMOJI.encode()[:count])
        assert deltas(byte_tokenizer(), [65], output) == [*[""] * count, "\ufffd"]


def test_bytes_that_never_complete_are_shown_as_soon_as_that_is_certain() -> None:
    sent = deltas(byte_tokenizer(), [65], [0xF0, 0xFF, 0x9F, 65])
    assert sent == ["", "\ufffd\ufffd", "\ufffd", "A", ""]


def test_a_real_replacement_character_is_not_held_back() -> None:
    assert deltas(byte_tokenizer(), [65], [*"\ufffd".encode(), 65]) == ["", "", "\ufffd", "A", ""]


# Stop strings


def feed_all(checker: StopChecker, pieces: list[str]) -> tuple[list[str], str | None]:
    """What is sent for each piece, then what is flushed; and the stop string that was met."""
    sent: list[str] = []
    for piece in pieces:
        result = checker.feed(piece)
        if isinstance(result, StopMatch):
            return [*sent, result.text], result.stop
        sent.append(result)
    return [*sent, checker.flush()], None


def test_a_stop_string_across_pieces_is_never_shown() -> None:  # B074
    sent, stop = feed_all(StopChecker(["own fox"]), ["The quick br", "own", " fo", "x jumps"])
    assert (sent, stop) == (["The quick br", "", "", ""], "own fox")
    assert feed_all(StopChecker(["\n\n"]), ["a", "\n", "\n"]) == (["a", "", ""], "\n\n")


def test_held_text_is_released_once_it_cannot_match() -> None:  # B074
    sent, stop = feed_all(StopChecker(["own fox"]), ["br", "own", " de", "ed"])
    assert (sent, stop) == (["br", "", "own de", "ed", ""], None)


def test_only_the_longest_proper_prefix_is_held() -> None:  # B074
    sent, _ = feed_all(StopChecker(["aab"]), ["xaaa", "a"])
    assert sent == ["xa", "a", "aa"]


def test_the_match_that_starts_first_wins_then_the_shortest() -> None:  # B074, B076
    assert feed_all(StopChecker(["four", "ab"]), ["xaby four"]) == (["x"], "ab")
    assert feed_all(StopChecker(["abc", "ab"]), ["xabc"]) == (["x"], "ab")
    assert feed_all(StopChecker(["cd", "bcde"]), ["abcdef"]) == (["a"], "bcde")


def test_text_after_the_match_is_cut_and_the_stop_string_included_on_request() -> None:  # B076
    assert feed_all(StopChecker(["five"]), ["xfivey"]) == (["x"], "five")
    assert feed_all(StopChecker(["five"], True), ["xfi", "vey"]) == (["x", "five"], "five")


def test_a_match_that_completes_too_early_is_plain_text() -> None:
    checker = StopChecker(["ab", "abc"])
    assert checker.feed("xab", may_stop=False) == "x"
    assert checker.feed("d") == "abd"
    assert checker.feed("ab", may_stop=False) == ""
    assert checker.feed("c") == StopMatch("abc", "")


@given(
    st.text(alphabet="ab", max_size=24),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_letter_by_letter_text_is_cut_where_the_first_match_completes(
    text: str, stops: list[str], include: bool
) -> None:
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    sent, stop = feed_all(StopChecker(stops, include), list(text))
    if not ends:
        assert (stop, "".join(sent)) == (None, text)
        return
    end = ends[0]
    longest = max((stop for stop in stops if text[:end].endswith(stop)), key=len)
    assert stop == longest  # it starts first
    assert "".join(sent) == (text[:end] if include else text[: end - len(longest)])


@given(
    st.lists(st.text(alphabet="abc", max_size=5), max_size=6),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_what_was_sent_is_always_a_prefix_of_the_final_text(
    pieces: list[str], stops: list[str]
) -> None:
    sent, stop = feed_all(StopChecker(stops), pieces)
    whole = "".join(pieces)
    assert whole.startswith("".join(sent))
    assert (stop is None) == (not any(stop in whole for stop in stops))
    for index in range(len(sent) - 1):  # held back exactly what could still match
        held = whole[len("".join(sent[: index + 1])) : len("".join(pieces[: index + 1]))]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)
