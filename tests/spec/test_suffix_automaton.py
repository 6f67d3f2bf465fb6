import random
from collections import Counter
from collections.abc import Sequence

import pytest

from nano.spec.suffix_automaton import Match, SuffixAutomaton
from tests.spec.texts import random_text

SEPARATOR = -1


def continuations(text: Sequence[int], context: Sequence[int]) -> list[int]:
    """The slow twin: what follows each occurrence of `context`, in order."""
    places = range(len(text) - len(context))
    return [text[i + len(context)] for i in places if text[i : i + len(context)] == context]


def occurs(text: Sequence[int], run: Sequence[int]) -> bool:
    return any(text[i : i + len(run)] == run for i in range(len(text) - len(run) + 1))


def longest_match(text: Sequence[int], ending: Sequence[int], max_depth: int) -> int:
    lengths = range(min(max_depth, len(ending)), 0, -1)
    return next((n for n in lengths if occurs(text, ending[len(ending) - n :])), 0)


def drafted(
    text: Sequence[int], context: list[int], max_depth: int, num_tokens: int, min_prob: float
) -> tuple[list[int], float]:
    """The slow twin of `SuffixAutomaton.draft`, by definition: counts over all of the text."""
    drafts: list[int] = []
    prob, num_expected = 1.0, 0.0
    while len(drafts) < num_tokens:
        while context and not continuations(text, context):
            context = context[1:]
        if not context:
            break
        found = continuations(text, context)
        counts = Counter(found)
        latest = {token_id: place for place, token_id in enumerate(found)}
        token_id = max(counts, key=lambda token: (counts[token], latest[token]))
        prob *= counts[token_id] / len(found)
        if token_id == SEPARATOR or prob < min_prob:
            break
        drafts.append(token_id)
        num_expected += prob
        context = [*context, token_id][-max_depth:]
    return drafts, num_expected


def text_with_separators(rng: random.Random, num_tokens: int) -> list[int]:
    return [token if rng.random() > 0.04 else SEPARATOR for token in random_text(rng, num_tokens)]


def test_drafts_and_their_odds_are_those_counted_over_the_whole_text():
    rng = random.Random(0)
    for _ in range(500):
        max_depth = rng.randint(1, 6)
        automaton = SuffixAutomaton(max_depth)
        text: list[int] = []
        for token_id in text_with_separators(rng, 40):
            automaton.append(token_id)
            text.append(token_id)
            match = automaton.match_own_ending()
            assert match.length == longest_match(text[:-1], text, max_depth), text
            num_tokens, min_prob = rng.randint(1, 9), rng.choice([0.0, 0.1, 0.4])
            drafts, num_expected = automaton.draft(match, num_tokens, min_prob)
            context = text[len(text) - match.length :]
            expected = drafted(text, context, max_depth, num_tokens, min_prob)
            assert drafts == expected[0], text
            assert num_expected == pytest.approx(expected[1])


def test_a_match_of_another_text_is_the_longest_one():
    rng = random.Random(1)
    for _ in range(200):
        max_depth = rng.randint(1, 6)
        automaton = SuffixAutomaton(max_depth)
        text = text_with_separators(rng, 40)
        for token_id in text:
            automaton.append(token_id)
        other, match = random_text(rng, 40), Match()
        for end, token_id in enumerate(other, 1):
            automaton.follow(match, token_id)
            assert match.length == longest_match(text, other[:end], max_depth)
            expected = drafted(text, other[end - match.length : end], max_depth, 5, 0.0)
            assert automaton.draft(match, 5, 0.0)[0] == expected[0]


def test_matches_survive_the_growth_of_the_text():
    rng = random.Random(2)
    for _ in range(200):
        max_depth = rng.randint(1, 6)
        automaton = SuffixAutomaton(max_depth)
        text, other, match = [], random_text(rng, 60), Match()
        last_growth = 0
        for end, token_id in enumerate(other, 1):
            if end < 45:
                last_growth = end
                for token in random_text(rng, rng.randint(0, 4)):
                    automaton.append(token)
                    text.append(token)
            before = other[end - 1 - match.length : end - 1]
            assert automaton.draft(match, 5, 0.0)[0] == drafted(text, before, max_depth, 5, 0.0)[0]
            automaton.follow(match, token_id)
            context = other[end - match.length : end]
            longest = longest_match(text, other[:end], max_depth)
            # A text that comes later may hold a longer match than the one that was followed.
            assert match.length <= longest
            assert match.length == longest or end < last_growth + max_depth
            expected = drafted(text, context, max_depth, 5, 0.0)
            drafts, num_expected = automaton.draft(match, 5, 0.0)
            assert drafts == expected[0]
            assert num_expected == pytest.approx(expected[1])


def test_there_are_less_than_two_states_per_token():
    rng = random.Random(3)
    for text in ([5] * 300, list(range(300)), random_text(rng, 300), [1] + [2] * 299):
        automaton = SuffixAutomaton(8)
        for token_id in text:
            automaton.append(token_id)
        assert automaton.num_tokens == 300
        assert automaton.num_states < 600


def test_nothing_is_drafted_without_a_match():
    automaton = SuffixAutomaton(8)
    assert automaton.draft(automaton.match_own_ending(), 4, 0.0) == ([], 0.0)
    for token_id in (1, 2, 3):
        automaton.append(token_id)
    assert automaton.draft(automaton.match_own_ending(), 4, 0.0) == ([], 0.0)
