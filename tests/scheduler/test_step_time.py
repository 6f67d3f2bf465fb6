"""What a step is predicted to take, and what speaks against drafts whatever is predicted."""

import random

import numpy as np
import pytest

from nano.scheduler.step_time import SpeculationGuard, StepCosts, StepLoad, StepTime, StepTiming
from nano.speculation import ProposerInfo

POINTS = [(1, 0.010), (4, 0.011), (8, 0.012), (16, 0.024)]


def timing(num_tokens=1, target=0.010, draft=0.0, num_passes=0, num_runs=0, other=0.001):
    return StepTiming(num_tokens, target, draft, num_passes, num_runs, other)


def test_measured_points_are_predicted_and_lines_run_between_and_beyond_them():
    model = StepTime(POINTS)
    np.testing.assert_allclose(model.seconds([1, 4, 8, 16]), [0.010, 0.011, 0.012, 0.024])
    assert model.seconds(6) == pytest.approx(0.0115)
    assert model.seconds(12) == pytest.approx(0.018)
    assert model.seconds(100) == pytest.approx(0.024 + 84 * 0.0015)
    assert StepTime([(3, 0.01)]).seconds(300) == pytest.approx(0.01)


def test_more_tokens_are_never_predicted_to_take_less():
    rng = random.Random(0)
    model = StepTime([(1, 0.012), (4, 0.010), (8, 0.014)])  # measured in noise
    assert np.all(np.diff(model.seconds(np.arange(1, 400))) >= 0)
    for _ in range(300):
        model.observe(rng.randint(1, 40), rng.uniform(0.001, 0.1))
        assert np.all(np.diff(model.seconds(np.arange(1, 400))) >= 0)


@pytest.mark.parametrize("slope", [0.0, 0.0005, 0.01])
def test_steps_teach_a_curve_that_is_not_the_measured_one(slope: float):
    rng = random.Random(1)
    model = StepTime(POINTS)
    for _ in range(1500):
        num_tokens = rng.choice([1, 4, 8, 16, 32])
        model.observe(num_tokens, (0.02 + slope * num_tokens) * rng.gauss(1, 0.03))
    for num_tokens in (1, 4, 8, 16, 32):
        assert model.seconds(num_tokens) == pytest.approx(0.02 + slope * num_tokens, rel=0.06)


def test_what_slows_all_steps_is_learned_from_one_size_for_the_others_too():
    model = StepTime(POINTS)
    for index in range(100):
        model.observe(1 if index % 2 else 8, 3 * (0.010 if index % 2 else 0.012))
    assert model.seconds(16) > 1.5 * 0.024


def test_single_steps_ten_times_slower_hardly_count_but_lasting_slowness_does():
    rng = random.Random(2)
    model = StepTime(POINTS)
    for _ in range(1000):
        model.observe(4, 0.011 * (10 if rng.random() < 0.03 else 1) * rng.gauss(1, 0.02))
    assert model.seconds(4) == pytest.approx(0.011, rel=0.08)
    for _ in range(60):
        model.observe(4, 0.033)
    assert model.seconds(4) == pytest.approx(0.033, rel=0.08)


def test_prompts_beside_it_are_not_charged_to_a_step_of_decoding_requests():
    costs = StepCosts([], POINTS)
    assert costs.step(StepLoad(4, 4), 0) == pytest.approx(0.011)
    assert costs.step(StepLoad(16, 4), 0) == pytest.approx(0.011)
    # A draft beside them costs what it costs there.
    assert costs.step(StepLoad(16, 4), 1) == pytest.approx(0.011 + 0.0015)


def test_passes_follow_the_targets_curve_until_they_are_measured():
    costs = StepCosts([ProposerInfo("small", 4, is_free=False, pass_seconds=0.001)], POINTS)
    assert costs.passes("small", 1) == pytest.approx(0.001)
    assert costs.passes("small", 16) == pytest.approx(0.0024)
    assert costs.passes("small", 0.25) == pytest.approx(0.00025)  # needed one time in four
    for _ in range(50):
        costs.observe(timing(draft=0.012, num_passes=3, num_runs=3), {"small": 3})
    assert costs.passes("small", 1) == pytest.approx(0.004, rel=0.05)


def test_seconds_of_two_models_are_divided_as_they_were_expected():
    infos = [
        ProposerInfo(n, 4, is_free=False, pass_seconds=s) for n, s in (("a", 1e-3), ("b", 3e-3))
    ]
    costs = StepCosts(infos, POINTS)
    seconds = costs.observe(timing(draft=0.010, num_passes=4, num_runs=4), {"a": 2, "b": 1})
    assert seconds == pytest.approx({"a": 0.004, "b": 0.006})


def run_guard(guard: SpeculationGuard, num_steps: int, gain: float, slowness: float, load=4):
    """Steps with drafts give `gain` times the tokens in `slowness` times the seconds; returns
    whether each was let have drafts."""
    let = []
    for _ in range(num_steps):
        let.append(guard.lets_draft)
        tokens, seconds = (gain, slowness) if let[-1] else (1.0, 1.0)
        guard.observe(load, round(load * tokens), 0.01 * seconds, has_drafts=let[-1])
    return let


@pytest.mark.parametrize(("slowness", "gain"), [(1.5, 4 / 3), (1.8, 10 / 9), (1.0, 2.0)])
def test_drafts_that_win_are_interrupted_the_more_rarely_the_more_they_win(slowness, gain):
    let = run_guard(SpeculationGuard(), 6000, gain=2, slowness=slowness)
    num_lost = let.count(False) * (gain - 1)  # steps' worth of tokens
    assert 0 < num_lost < 0.005 * 6000


def test_drafts_that_lose_are_paused_ever_longer():
    let = run_guard(SpeculationGuard(), 6000, gain=2, slowness=3)
    assert let[:6] == [True] * 6
    assert let.count(True) < 0.01 * 6000
    assert True in let[20:140]


def test_a_pause_ends_when_the_load_is_another_but_not_when_it_is_about_the_same():
    for load, is_over in ((3, False), (6, False), (1, True), (16, True)):
        guard = SpeculationGuard()
        run_guard(guard, 20, gain=2, slowness=3)
        assert not guard.lets_draft
        run_guard(guard, 1, gain=2, slowness=3, load=load)
        assert guard.lets_draft == is_over, load


def test_prompts_in_every_step_keep_no_look_at_steps_without_drafts_open():
    guard = SpeculationGuard()
    while guard.lets_draft:
        run_guard(guard, 1, gain=2, slowness=1.5)
    guard.observe_prompts()
    assert guard.lets_draft


def test_one_slow_step_does_not_pause_drafts():
    guard = SpeculationGuard()
    for step in range(400):
        slow = 10 if step % 50 == 3 else 1
        has_drafts = guard.lets_draft
        guard.observe(1, 2 if has_drafts else 1, 0.01 * slow, has_drafts=has_drafts)
    assert guard.num_steps_off <= 9  # looks
