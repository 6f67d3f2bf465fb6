"""Bucket sizes, and which graph serves a step: arithmetic, against brute force."""

import random
from itertools import combinations

import pytest

from nano.attention.backend import GraphSupport
from nano.compile.graph_buckets import best_buckets, bucket_of, ladder
from nano.compile.graph_keys import GraphKey, GraphKeys, StepShape, settle_mode

KEYS = GraphKeys((1, 2, 4, 8, 16, 32), {1: (1, 2, 4, 8), 3: (1, 2, 5)})
GRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def step(*query_lens: int) -> StepShape:
    longest = max(query_lens)
    return StepShape(sum(query_lens), len(query_lens), longest, set(query_lens) == {longest})


def padding(histogram: dict[int, int], buckets: tuple[int, ...]) -> int:
    return sum(count * (bucket_of(size, buckets) - size) for size, count in histogram.items())


def test_a_size_goes_to_the_smallest_bucket_that_it_fits():
    assert [bucket_of(size, (1, 4, 8)) for size in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    assert bucket_of(1, ()) is None


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 9, 64, 65, 100, 512, 2000])
def test_the_ladder_rises_to_its_end_and_wastes_a_fifth_at_most_above_64(largest):
    sizes = ladder(largest)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == largest
    for size in range(65, largest + 1):
        bucket = bucket_of(size, sizes)
        assert bucket - size <= bucket / 5


def test_the_ladder_has_few_sizes():
    assert len(ladder(512)) == 23


def test_best_buckets_pad_as_little_as_the_best_of_all_choices():
    generator = random.Random(3)
    for _ in range(100):
        sizes = generator.sample(range(1, 13), generator.randint(1, 8))
        histogram = {size: generator.randint(1, 20) for size in sizes}
        buckets = best_buckets(histogram, generator.randint(1, 9))
        choices = combinations(range(1, 13), len(buckets))
        fitting = [choice for choice in choices if choice[-1] >= max(sizes)]
        assert list(buckets) == sorted(buckets)
        assert padding(histogram, buckets) == min(padding(histogram, each) for each in fitting)


def test_as_many_buckets_are_used_as_there_are_sizes():
    assert best_buckets({7: 1, 3: 5, 9: 2}, 1) == (9,)
    assert best_buckets({7: 1, 3: 5, 9: 2}, 2) == (3, 9)
    assert best_buckets({7: 1, 3: 5, 9: 2}, 8) == (3, 7, 9)


def test_of_nothing_seen_there_are_no_buckets():
    assert best_buckets({}, 4) == ()
    assert best_buckets({8: 0}, 4) == ()


@pytest.mark.parametrize(
    ("shape", "key", "num_padding"),
    [
        (step(1), GraphKey(1, 1), 0),
        (step(1, 1, 1), GraphKey(4, 4), 1),
        (step(*[1] * 9), GraphKey(16), 7),  # more requests than a full graph has
        (step(3), GraphKey(3, 1), 0),
        (step(3, 3, 3), GraphKey(15, 5), 6),
        (step(*[3] * 6), GraphKey(32), 14),
        (step(2, 2), GraphKey(4), 0),  # uniform, of a length that is not captured
        (step(1, 3), GraphKey(4), 0),
        (step(1, 1, 20), GraphKey(32), 10),
        (step(32), GraphKey(32), 0),
    ],
    ids=str,
)
def test_a_step_goes_to_the_smallest_graph_that_it_fits(shape, key, num_padding):
    dispatch = KEYS.dispatch(shape)
    assert (dispatch.key, dispatch.num_padding_tokens) == (key, num_padding)


@pytest.mark.parametrize(
    ("keys", "shape", "why"),
    [
        (KEYS, step(33), "more than 32 tokens"),
        (GraphKeys((), {1: (1, 2)}), step(1, 2), "several lengths"),
        (GraphKeys((), {1: (1, 2)}), step(1, 1, 1), "no graph for so many requests"),
        (GraphKeys(), step(1), "no graph"),
    ],
)
def test_a_step_that_fits_no_graph_runs_eagerly_and_the_reason_is_known(keys, shape, why):
    dispatch = keys.dispatch(shape)
    assert dispatch.key is None
    assert why in dispatch.why_eager


def test_every_step_goes_to_a_graph_that_is_captured_and_holds_it():
    generator = random.Random(4)
    keys = GraphKeys.of_mode("FULL_AND_PIECEWISE", 300, 40, (1, 4))
    order = keys.capture_order()
    for _ in range(2000):
        lens = [generator.choice((1, 1, 4, 60)) for _ in range(generator.randint(1, 50))]
        shape = step(*(lens if generator.random() < 0.5 else lens[:1] * len(lens)))
        dispatch = keys.dispatch(shape)
        if dispatch.key is None:
            assert shape.num_tokens > 300
            continue
        assert dispatch.key in order
        assert dispatch.key.num_tokens - dispatch.num_padding_tokens == shape.num_tokens
        assert dispatch.num_padding_tokens >= 0
        if dispatch.key.is_full:
            assert dispatch.key.num_requests >= shape.num_requests
            assert dispatch.key.query_len == shape.query_len


def test_the_largest_graphs_are_captured_first_pieces_before_whole_steps():
    order = KEYS.capture_order()
    assert [key.num_tokens for key in order] == [32, 16, 8, 4, 2, 1, 15, 8, 6, 4, 3, 2, 1]
    assert [key.is_full for key in order] == [False] * 6 + [True] * 7
    assert (KEYS.max_num_tokens, KEYS.max_num_requests) == (32, 8)


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_a_mode_says_which_steps_are_graphs(mode):
    settled, _ = settle_mode(mode, GraphSupport.FULL_DECODE, "triton")
    keys = GraphKeys.of_mode(settled, 64, 8, (1, 3))
    has_full, has_pieces = (
        any(key.is_full is is_full for key in keys.capture_order()) for is_full in (True, False)
    )
    assert has_full == mode.startswith("FULL")
    assert has_pieces == (mode in ("PIECEWISE", "FULL", "FULL_AND_PIECEWISE"))


@pytest.mark.parametrize(
    ("wanted", "support", "settled", "why"),
    [
        ("NONE", GraphSupport.NONE, "NONE", ""),
        ("FULL", GraphSupport.NONE, "NONE", "attention backend x serves no graphs"),
        ("PIECEWISE", GraphSupport.PIECEWISE, "PIECEWISE", ""),
        ("FULL_DECODE_ONLY", GraphSupport.PIECEWISE, "PIECEWISE", "backend x cannot be captured"),
        ("FULL_AND_PIECEWISE", GraphSupport.FULL_DECODE, "FULL_AND_PIECEWISE", ""),
        ("FULL", GraphSupport.FULL_DECODE, "FULL_AND_PIECEWISE", "several lengths"),
    ],
)
def test_a_mode_that_cannot_be_had_is_replaced_and_the_reason_given(wanted, support, settled, why):
    mode, reason = settle_mode(wanted, support, "x")
    assert mode == settled
    assert why in reason
    assert bool(reason) == (wanted != settled)


def test_full_graphs_hold_no_more_tokens_than_pay():
    keys = GraphKeys.of_mode("FULL_DECODE_ONLY", 8192, 1000, (1, 5))
    assert keys.request_buckets[1][-1] == 512
    assert keys.request_buckets[5][-1] == 102
    assert GraphKeys.of_mode("FULL_DECODE_ONLY", 4, 8, (1, 5)).request_buckets == {1: (1, 2, 4)}


def test_sizes_that_are_told_are_those_of_the_graphs():
    sizes = (64, 8, 5, 1, 900)
    keys = GraphKeys.of_mode("FULL_AND_PIECEWISE", 600, 40, (1, 5), sizes)
    assert keys.token_buckets == (1, 5, 8, 64)
    assert keys.request_buckets == {1: (1, 5, 8), 5: (1, 2, 13)}  # 13 x 5 hold 64 tokens
    assert GraphKeys.of_mode("PIECEWISE", 600, 40, (1, 5), sizes).request_buckets == {}
    assert GraphKeys.of_mode("FULL_DECODE_ONLY", 600, 40, (1,), (50,)) == GraphKeys()


def observed(seed: int) -> dict[StepShape, int]:
    generator = random.Random(seed)
    shapes: dict[StepShape, int] = {}
    for _ in range(300):
        shape = step(*[generator.choice((1, 3))] * generator.randint(1, 20))
        if generator.random() < 0.3:
            shape = step(1, generator.randint(2, 90))
        shapes[shape] = shapes.get(shape, 0) + 1
    return shapes


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fitted_keys_are_as_many_graphs_for_the_same_steps_and_pad_them_less(mode, seed):
    keys, shapes = GraphKeys.of_mode(mode, 64, 16, (1, 3)), observed(seed)
    fitted = keys.fitted(shapes)
    assert fitted.num_padding_tokens(shapes) < 0.7 * keys.num_padding_tokens(shapes)
    for shape in shapes:
        old, new = keys.dispatch(shape), fitted.dispatch(shape)
        assert (old.key is None) == (new.key is None)
        assert old.key is None or new.key is None or old.key.is_full == new.key.is_full
    assert len(fitted.capture_order()) == len(keys.capture_order())
    for old_buckets, new_buckets in (
        (keys.token_buckets, fitted.token_buckets),
        *((keys.request_buckets[q], fitted.request_buckets[q]) for q in keys.request_buckets),
    ):
        assert len(new_buckets) == len(old_buckets)
        assert new_buckets[-1:] == old_buckets[-1:]


def test_keys_fitted_to_one_size_still_serve_all_others():
    keys = GraphKeys.of_mode("FULL_DECODE_ONLY", 512, 256)
    fitted = keys.fitted({step(1, 1, 1): 5000})
    assert fitted.dispatch(step(1, 1, 1)).num_padding_tokens == 0
    for num_requests in range(1, 257):
        before, after = (x.dispatch(step(*[1] * num_requests)) for x in (keys, fitted))
        assert after.key is not None
        assert after.num_padding_tokens <= before.num_padding_tokens + 16


def test_kinds_of_steps_that_nobody_saw_keep_their_graphs():
    keys = GraphKeys.of_mode("FULL_AND_PIECEWISE", 64, 8, (1, 3))
    assert keys.fitted({}) == keys
    fitted = keys.fitted({step(1, 1, 1): 100, step(9000): 10})
    assert fitted.token_buckets == keys.token_buckets
    assert fitted.request_buckets[3] == keys.request_buckets[3]
    assert fitted.request_buckets[1] != keys.request_buckets[1]
