import random
from collections.abc import Sequence

import pytest

from nano.spec.prediction import PredictionProposer
from tests.spec.texts import array_of, guess, new_request

PROMPT = [1, 2, 3]
PREDICTION = tuple(range(100, 160))


def start(proposer: PredictionProposer, prediction: Sequence[int] = PREDICTION) -> None:
    proposer.start(new_request(PROMPT, prediction_token_ids=tuple(prediction)))


def guess_after(output: Sequence[int], num_tokens: int = 3) -> list[int]:
    """What is guessed after `output`, which came token by token."""
    proposer = PredictionProposer()
    start(proposer)
    for end in range(len(output) + 1):
        drafts = guess(proposer, [*PROMPT, *output[:end]], num_tokens)
    return drafts


def run(prediction: Sequence[int], output: Sequence[int], num_tokens: int) -> tuple[int, int]:
    """(drafts that were right, steps) of a whole request that says `output`."""
    proposer = PredictionProposer()
    start(proposer, prediction)
    num_right = num_steps = end = 0
    while end < len(output):
        drafts = guess(proposer, [*PROMPT, *output[:end]], num_tokens)
        rest = output[end:]
        num_accepted = next(
            (i for i, pair in enumerate(zip(drafts, rest)) if pair[0] != pair[1]),
            min(len(drafts), len(rest)),
        )
        num_right += num_accepted
        num_steps += 1
        end += num_accepted + 1
    return num_right, num_steps


def edited(rng: random.Random, text: Sequence[int], num_edits: int) -> list[int]:
    """`text` with runs of one to three tokens replaced, put in or taken out, far apart."""
    places = sorted(rng.sample(range(1, len(text) // 20), num_edits), reverse=True)
    output = list(text)
    for place in places:
        at, num_old, num_new = place * 20, rng.randint(0, 3), rng.randint(0, 3)
        output[at : at + num_old] = [rng.randrange(5000, 6000) for _ in range(num_new)]
    return output


def test_an_output_as_predicted_is_drafted_from_the_first_token_to_the_last():
    assert guess_after([], 2) == [100, 101]
    num_right, num_steps = run(PREDICTION, PREDICTION, 8)
    assert num_steps == 7  # 60 tokens, 8 drafts and a bonus token at a time
    assert num_right == 60 - 6  # the last step needs no bonus token


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param([100, 101, 7], [103, 104, 105], id="replaced: guessed at once"),
        pytest.param([100, 101, 7, 103], [104, 105, 106], id="replaced, and confirmed"),
        pytest.param([100, 101, 7, 8], [], id="two replaced: nothing to go by"),
        pytest.param([100, 101, 7, 8, 104], [105, 106, 107], id="two replaced, and found"),
        pytest.param([100, 101, 7, 102], [103, 104, 105], id="inserted"),
        pytest.param([100, 101, 101], [102, 103, 104], id="said twice"),
        pytest.param([100, 101, 105], [106, 107, 108], id="deleted"),
        pytest.param([100, 101, 155, 156], [157, 158, 159], id="a long way deleted"),
        pytest.param([150, 151, 100, 101], [102, 103, 104], id="moved"),
        pytest.param([7, 100], [101, 102, 103], id="inserted before the first"),
        pytest.param([*PREDICTION, 7], [], id="past the end"),
    ],
)
def test_after_an_edit_drafting_goes_on(output: list[int], expected: list[int]):
    assert guess_after(output) == expected


def test_the_longest_ending_decides_then_the_nearest_place_ahead_then_behind():
    prediction = [5, 50, 1, 2, 7, 8, 3, 9, 5, 60, 7, 5, 70, 4]
    output = [5, 50, 1, 2]
    proposer = PredictionProposer()
    start(proposer, prediction)
    assert guess(proposer, [*PROMPT, *output], 1) == [7]
    for token_id, expected in (
        (99, 8),  # nowhere predicted: in place of the 7
        (7, 8),  # of two places the nearer one
        (5, 70),  # at three places: not 60, which is nearer, nor 50, since 7 comes before 5
        (70, 4),
        (4, None),  # the end
        (5, 70),  # behind now: the nearest of three, and not of those with a 4 before
        (50, 1),
    ):
        output.append(token_id)
        drafts = guess(proposer, [*PROMPT, *output], 1)
        assert drafts == ([] if expected is None else [expected]), output


@pytest.mark.parametrize("num_tokens", [1, 4, 16])
def test_edits_cost_no_more_than_the_tokens_that_find_the_place_again(num_tokens: int):
    rng = random.Random(num_tokens)
    for _ in range(150):
        prediction = [rng.randrange(100, 4000) for _ in range(300)]
        num_edits = rng.randint(0, 8)
        output = edited(rng, prediction, num_edits)
        num_right, num_steps = run(prediction, output, num_tokens)
        assert num_right + num_steps >= len(output)
        # Without edits, every step gives one token more than its drafts. An edit costs at most the
        # step it falls in, one for each new token and one to find the place again.
        assert num_steps <= -(-len(output) // (num_tokens + 1)) + 5 * num_edits


def test_a_replaced_token_costs_one_step():
    rng = random.Random(0)
    prediction = list(range(100, 400))
    for _ in range(20):
        output = list(prediction)
        places = rng.sample(range(1, 30), 8)
        for place in places:
            output[place * 10] = rng.randrange(5000, 6000)
        num_steps = 0
        # The best that any drafts of 16 can do: right up to each replaced token, which is sampled.
        end = 0
        while end < len(output):
            wrong = next((i for i in range(end, len(output)) if output[i] >= 5000), len(output))
            end = min(end + 17, wrong + 1)
            num_steps += 1
        assert run(prediction, output, 16)[1] == num_steps


def test_chunks_of_output_lead_to_the_same_place_as_single_tokens():
    rng = random.Random(1)
    for _ in range(50):
        prediction = [rng.randrange(100, 4000) for _ in range(100)]
        output = edited(rng, prediction, 2)
        single, chunked = PredictionProposer(), PredictionProposer()
        start(single, prediction)
        start(chunked, prediction)
        for end in range(len(output)):
            drafts = guess(single, [*PROMPT, *output[:end]], 4)
        assert drafts == guess(chunked, [*PROMPT, *output[:end]], 4)


def test_a_request_that_returns_after_preemption_goes_on_where_it_was():
    proposer = PredictionProposer()
    start(proposer)
    output = [*PREDICTION[:10], 7]
    guess(proposer, [*PROMPT, *output], 2)
    proposer.forget("a", has_ended=False)
    again = new_request([*PROMPT, *output], len(PROMPT), prediction_token_ids=PREDICTION)
    proposer.start(again)
    proposer.advance("a", array_of(PROMPT))  # its KV is being computed again
    assert guess(proposer, [*PROMPT, *output], 2) == [111, 112]
    proposer.forget("a", has_ended=True)
    proposer.start(again)  # nobody remembers: found from the output
    assert guess(proposer, [*PROMPT, *output], 2) == [111, 112]


def test_a_request_of_the_same_name_with_another_prediction_starts_afresh():
    proposer = PredictionProposer()
    start(proposer)
    guess(proposer, [*PROMPT, 100, 101], 2)
    proposer.forget("a", has_ended=False)
    start(proposer, range(200, 220))
    assert guess(proposer, PROMPT, 2) == [200, 201]


def test_only_so_many_departed_requests_are_remembered():
    proposer = PredictionProposer()
    for index in range(100):
        proposer.start(new_request([1], request_id=str(index), prediction_token_ids=(1, 2)))
        proposer.forget(str(index), has_ended=False)
    assert list(proposer._departed) == [str(index) for index in range(68, 100)]


def test_it_serves_requests_with_a_prediction_only():
    assert PredictionProposer.needs_prediction
