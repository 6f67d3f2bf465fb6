import random
from collections.abc import Sequence

import pytest

from nano.spec import suffix
from nano.spec.suffix import OutputStore, PastOutputs, SuffixProposer
from tests.spec.test_suffix_automaton import drafted, longest_match
from tests.spec.texts import array_of, chunks_of, guess, new_request, random_text

STORY = list(range(100, 140))


def make_proposer(
    max_tree_depth: int = 8,
    max_cached_requests: int = 100,
    max_spec_factor: float = 4.0,
    min_token_prob: float = 0.1,
    **bounds: int,
) -> SuffixProposer:
    return SuffixProposer(
        max_tree_depth, max_cached_requests, max_spec_factor, min_token_prob, **bounds
    )


def finish(proposer: SuffixProposer, output: Sequence[int], cache_salt: str | None = None) -> None:
    """Run a request that says `output`, to its end."""
    request = new_request([7], request_id="past", cache_salt=cache_salt)
    proposer.start(request)
    proposer.advance("past", array_of([7, *output]))
    proposer.forget("past", has_ended=True)


def absorb_all(proposer: SuffixProposer, cache_salt: str | None = None) -> None:
    outputs = proposer.store.get(cache_salt)
    while outputs is not None and outputs.num_queued_tokens:
        outputs.absorb(1000)


def first_guess(proposer: SuffixProposer, text: list[int], **fields: object) -> list[int]:
    """What a request that starts with `text` is told."""
    proposer.start(new_request(text, **fields))
    drafts = guess(proposer, text, 4)
    proposer.forget("a", has_ended=False)
    return drafts


@pytest.mark.parametrize("largest_chunk", [1, 7])
def test_drafts_from_its_own_text_are_those_counted_by_scanning_it(largest_chunk: int):
    rng = random.Random(largest_chunk)
    for _ in range(200):
        max_depth, factor = rng.randint(1, 6), rng.choice([0.5, 1.0, 2.0])
        proposer = make_proposer(max_depth, 0, factor, min_token_prob=0.2)
        text = random_text(rng, 40)
        proposer.start(new_request(text))
        for end in chunks_of(rng, len(text), largest_chunk):
            known, num_tokens = text[:end], rng.randint(1, 9)
            length = longest_match(known[:-1], known, max_depth)
            limit = min(num_tokens, int(factor * length))
            expected, _ = drafted(known, known[end - length :], max_depth, limit, 0.2)
            assert guess(proposer, known, num_tokens) == expected, known


@pytest.mark.parametrize("largest_chunk", [1, 20])
def test_drafts_from_past_outputs_are_those_counted_by_scanning_them(largest_chunk: int):
    rng = random.Random(largest_chunk)
    for _ in range(100):
        max_depth = rng.randint(1, 6)
        proposer = make_proposer(max_depth, min_token_prob=0.0)
        past: list[int] = []
        for _ in range(3):
            output = random_text(rng, rng.randint(2, 30))
            finish(proposer, output)
            past += [*output, -1]
        absorb_all(proposer)
        # Of tokens that the request repeats only in past outputs: no match with itself.
        text = [token for pair in zip(random_text(rng, 20), range(50, 70)) for token in pair]
        text += past[:4]
        proposer.start(new_request(text))
        for end in chunks_of(rng, len(text), largest_chunk):
            known = text[:end]
            own = longest_match(known[:-1], known, max_depth)
            length = longest_match(past, known, max_depth)
            drafts = guess(proposer, known, 5)
            if length and not own:
                context = known[end - length :]
                assert drafts == drafted(past, context, max_depth, min(5, 4 * length), 0.0)[0]


def test_the_source_that_promises_more_accepted_tokens_is_used():
    proposer = make_proposer(max_spec_factor=1.0)
    finish(proposer, [1, 2, 3, 4, 5, 6, 7])
    absorb_all(proposer)
    proposer.start(new_request([]))
    assert guess(proposer, [3, 9, 8, 1, 2, 3], 4) == [4, 5, 6]  # three tokens match, its own one
    assert guess(proposer, [3, 9, 8, 1, 2, 3, 9, 8], 4) == [1, 2, 3]


@pytest.mark.parametrize("prompt", [[5], [5, 6], list(range(50))])
def test_a_prompt_in_which_nothing_repeats_has_no_drafts(prompt: list[int]):
    assert first_guess(make_proposer(), prompt) == []


def test_equal_tokens_are_continued_by_more_of_them():
    assert first_guess(make_proposer(), [5] * 50) == [5] * 4
    assert first_guess(make_proposer(), [5] * 2) == [5] * 4


def test_an_output_serves_later_requests_of_its_own_salt_only():
    for mine, other in ((None, "x"), ("x", None), ("x", "y")):
        proposer = make_proposer()
        finish(proposer, STORY, mine)
        absorb_all(proposer, mine)
        assert first_guess(proposer, STORY[:8], cache_salt=mine) == STORY[8:12]
        assert first_guess(proposer, STORY[:8], cache_salt=other) == []


def test_what_other_salts_keep_changes_nothing():
    rng = random.Random(5)
    alone, among_others = make_proposer(), make_proposer()
    for step in range(60):
        output = random_text(rng, 30)
        for proposer in (alone, among_others):
            finish(proposer, output, "mine")
        finish(among_others, random_text(rng, 90), f"other {step % 5}")
        text = random_text(rng, 20)
        request = {"cache_salt": "mine"}
        assert first_guess(alone, text, **request) == first_guess(among_others, text, **request)
        queued = [p.store.get("mine").num_queued_tokens for p in (alone, among_others)]
        assert queued[0] == queued[1]


def test_a_prompt_is_not_kept():
    proposer = make_proposer()
    proposer.start(new_request(STORY))
    guess(proposer, [*STORY, 1, 2, 3], 4)
    proposer.forget("a", has_ended=True)
    absorb_all(proposer)
    assert first_guess(proposer, STORY[:8]) == []
    assert first_guess(proposer, [1, 2]) == [3]


def test_a_long_output_enters_in_small_portions():
    proposer = make_proposer()
    finish(proposer, list(range(30_000)))
    outputs = proposer.store.get(None)
    assert outputs is not None
    proposer.start(new_request([7]))
    for step in range(5):
        assert outputs.num_queued_tokens == 30_001 - step * suffix._MAX_ABSORBED_TOKENS
        proposer.advance("a", array_of([7]))


def test_a_request_that_returns_after_preemption_keeps_its_automaton():
    proposer = make_proposer()
    text = [1, 2, 3, 4, 1, 2]
    proposer.start(new_request(text[:4]))
    assert guess(proposer, text, 2) == [3, 4]
    automaton = proposer._requests["a"]._automaton
    proposer.forget("a", has_ended=False)
    assert proposer.store.num_tokens == 0
    proposer.start(new_request(text, 4))
    proposer.advance("a", array_of(text[:3]))  # its KV is being computed again
    assert guess(proposer, [*text, 3], 2) == [4, 1]
    assert proposer._requests["a"]._automaton is automaton
    assert automaton.num_tokens == 7


@pytest.mark.parametrize(
    ("token_ids", "num_prompt_tokens", "cache_salt"),
    [([9, 2, 3, 1, 2], 3, None), ([1, 2], 2, None), ([1, 2, 3, 1, 2], 3, "x")],
)
def test_another_request_of_the_same_name_starts_afresh(
    token_ids: list[int], num_prompt_tokens: int, cache_salt: str | None
):
    proposer = make_proposer()
    proposer.start(new_request([1, 2, 3]))
    guess(proposer, [1, 2, 3, 1, 2], 1)
    before = proposer._requests["a"]
    proposer.forget("a", has_ended=False)
    proposer.start(new_request(token_ids, num_prompt_tokens, cache_salt=cache_salt))
    assert proposer._requests["a"] is not before


def test_only_so_many_departed_requests_are_remembered():
    proposer = make_proposer()
    for index in range(100):
        proposer.start(new_request([1], request_id=str(index)))
        proposer.forget(str(index), has_ended=False)
    assert list(proposer._departed) == [str(index) for index in range(68, 100)]


def test_a_long_prefix_is_taken_in_over_several_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suffix, "_MAX_INDEXED_TOKENS", 5)
    proposer = make_proposer()
    finish(proposer, [1, 2, 9])
    absorb_all(proposer)
    text = [1, 2, 3, 1, 2, 3, 4, 5, 6, 7, 1, 2]
    proposer.start(new_request(text))
    # Past outputs need no more than its ending. Its own text promises more, once that is known.
    assert [guess(proposer, text, 3) for _ in range(3)] == [[9], [9], [3, 4, 5]]


def test_only_the_end_of_a_long_prefix_is_matched_with_past_outputs(
    monkeypatch: pytest.MonkeyPatch,
):
    proposer = make_proposer(max_tree_depth=8)
    finish(proposer, STORY)
    absorb_all(proposer)
    followed: list[int] = []
    follow = suffix.SuffixAutomaton.follow
    monkeypatch.setattr(
        suffix.SuffixAutomaton,
        "follow",
        lambda self, match, token_id: (followed.append(token_id), follow(self, match, token_id)),
    )
    proposer.start(new_request([]))
    prefix = list(range(200, 1200))
    guess(proposer, prefix[:10], 2)
    followed.clear()
    assert guess(proposer, [*prefix, *STORY[:20]], 2) == STORY[20:22]
    assert guess(proposer, [*prefix, *STORY[:22]], 2) == STORY[22:24]
    assert followed == STORY[12:22]


def test_the_latest_outputs_are_kept_within_the_bounds():
    outputs = PastOutputs(max_depth=4, max_outputs=6, max_tokens=100)
    store = make_proposer(max_cached_requests=6, max_tokens_per_salt=100)
    for index in range(200):
        output = list(range(10 * index, 10 * index + 9))
        outputs.add(array_with(output))
        outputs.absorb(1000)
        kept = sum(generation.num_tokens for generation in outputs.generations)
        states = sum(generation.num_states for generation in outputs.generations)
        assert kept <= 60
        assert states <= 2 * 60 + 2
        finish(store, output)
        absorb_all(store)
        if index > 4:
            for past in range(index - 2, index + 1):  # half of the six, the latest
                assert first_guess(store, [10 * past, 10 * past + 1]) != []
            assert first_guess(store, [10 * index - 60, 10 * index - 59]) == []


@pytest.mark.parametrize("num_tokens", [5, 99, 1000])
def test_no_salt_keeps_more_tokens_than_its_share(num_tokens: int):
    outputs = PastOutputs(max_depth=4, max_outputs=1000, max_tokens=100)
    for index in range(50):
        outputs.add(array_with(range(index, index + num_tokens)))
        outputs.absorb(30)
        assert sum(generation.num_tokens for generation in outputs.generations) <= 100
        assert outputs.num_queued_tokens <= 50
    outputs.absorb(1000)
    assert outputs.num_queued_tokens == 0


def test_the_least_recently_used_salts_go_first():
    store = OutputStore(4, 100, max_tokens_per_salt=100, max_tokens=1000, max_salts=3)
    for salt in ("a", "b", "c"):
        store.add(salt, array_with(range(10)))
    assert store.get("a") is not None  # used
    store.add("d", array_with(range(10)))
    assert [store.get(salt) is not None for salt in ("a", "b", "c", "d")] == [
        True,
        False,
        True,
        True,
    ]


def test_all_salts_together_are_bounded():
    store = OutputStore(4, 100, max_tokens_per_salt=100, max_tokens=250, max_salts=1000)
    for index in range(100):
        store.add(str(index), array_with(range(30)))
        assert store.num_tokens <= 250
    assert store.num_salts == 8


def test_no_past_outputs_are_kept_if_none_are_wanted():
    proposer = make_proposer(max_cached_requests=0)
    finish(proposer, STORY)
    assert proposer.store.num_salts == 0


def array_with(token_ids: Sequence[int]) -> "suffix.array[int]":
    return suffix.array("i", token_ids)
