import random
from collections.abc import Sequence

import pytest

from nano.spec import ngram
from nano.spec.ngram import NgramProposer
from tests.spec.texts import array_of, chunks_of, guess, new_request, random_text


def looked_up(text: Sequence[int], min_length: int, max_length: int, num_tokens: int) -> list[int]:
    """The slow twin: compare the ending with every place before it, and read on from there."""
    for length in range(max_length, min_length - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[len(text) - length :]:
                known = list(text)
                for place in range(start + length, start + length + num_tokens):
                    known.append(known[place])
                return known[len(text) :]
    return []


@pytest.mark.parametrize("largest_chunk", [1, 7])
def test_drafts_are_those_of_a_scan_over_all_places(largest_chunk: int):
    rng = random.Random(largest_chunk)
    for _ in range(1000):
        min_length = rng.randint(1, 3)
        max_length = rng.randint(min_length, 5)
        proposer = NgramProposer(min_length, max_length)
        text = random_text(rng, 40)
        proposer.start(new_request(text))
        for end in chunks_of(rng, len(text), largest_chunk):
            num_tokens = rng.randint(1, 9)
            expected = looked_up(text[:end], min_length, max_length, num_tokens)
            assert guess(proposer, text[:end], num_tokens) == expected, text[:end]


def test_of_equally_long_matches_the_most_recent_is_used():
    proposer = NgramProposer(2, 4)
    proposer.start(new_request([]))
    assert guess(proposer, [1, 2, 7, 1, 2, 8, 1, 2], 3) == [8, 1, 2]


def test_a_longer_match_is_preferred_to_a_more_recent_one():
    proposer = NgramProposer(2, 4)
    proposer.start(new_request([]))
    assert guess(proposer, [3, 1, 2, 7, 9, 1, 2, 8, 3, 1, 2], 2) == [7, 9]


@pytest.mark.parametrize("prompt", [[5], [5, 6], [5, 5], list(range(50))])
def test_a_prompt_in_which_nothing_repeats_has_no_drafts(prompt: list[int]):
    proposer = NgramProposer(2, 4)
    proposer.start(new_request(prompt))
    assert guess(proposer, prompt, 5) == []


def test_fifty_equal_tokens_are_continued_by_more_of_them():
    proposer = NgramProposer(2, 4)
    proposer.start(new_request([5] * 50))
    assert guess(proposer, [5] * 50, 60) == [5] * 60
    assert guess(proposer, [5] * 51, 1) == [5]


def test_requests_are_matched_with_their_own_text_only():
    proposer = NgramProposer(2, 4)
    for request_id in ("a", "b"):
        proposer.start(new_request([], request_id=request_id))
    assert guess(proposer, [1, 2, 3, 1, 2], 1, "a") == [3]
    assert guess(proposer, [4, 1, 2], 1, "b") == []


def test_a_request_that_returns_has_the_drafts_it_would_have_had():
    proposer = NgramProposer(2, 4)
    text = [1, 2, 3, 1, 2]
    for has_ended in (False, True):
        proposer.start(new_request(text))
        assert guess(proposer, text, 1) == [3]
        proposer.forget("a", has_ended=has_ended)


def test_a_long_prefix_is_taken_in_over_several_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ngram, "_MAX_INDEXED_TOKENS", 5)
    proposer = NgramProposer(2, 4)
    text = [1, 2, 6, 1, 2, 3, 4, 5, 7, 8, 1, 2]
    proposer.start(new_request(text))
    assert [guess(proposer, text, 2) for _ in range(3)] == [[], [], [3, 4]]


def test_what_an_index_keeps_is_bounded_by_what_differs():
    index = ngram.NgramIndex(2, 4)
    index.extend(array_of([1, 2, 3] * 1000))
    assert len(index._ends) == 9
