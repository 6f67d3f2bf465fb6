"""Who guesses and how much is verified: against brute force, and on machines that mislead."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from nano.scheduler.acceptance import Acceptance, DraftSlots
from nano.scheduler.draft_candidate import DraftCandidate
from nano.scheduler.draft_policy import DraftPolicy
from nano.scheduler.step_time import StepLoad
from nano.speculation import ProposerInfo
from nano.step import DraftRequest
from tests.scheduler.draft_simulator import (
    STATIONARY,
    USELESS,
    Fixed,
    Off,
    Scenario,
    always,
    bursts,
    changing,
    decoding,
    flat,
    flat_then_linear,
    half,
    linear,
    make_policy,
    model,
    oracle,
    simulate,
    steady,
    stepwise,
    text,
)

TEXT = ProposerInfo("text", 8, is_free=True)
OTHER_TEXT = ProposerInfo("other text", 4, is_free=True)
MODEL = ProposerInfo("model", 4, is_free=False, pass_seconds=0.0001)
FLAT = [(1, 0.010), (64, 0.011)]
STEEP = [(1, 0.010), (64, 0.640)]


def observe_often(policy: DraftPolicy | Acceptance, request_id, proposer, drafts, accepted, n=60):
    for _ in range(n):
        policy.observe(request_id, proposer, drafts, accepted)


# What the estimates say


def test_a_request_nobody_knows_is_taken_for_an_average_one():
    acceptance = Acceptance(["text"])
    for index in range(50):
        acceptance.observe(f"old-{index}", "text", 4, 2)
    first, second, third = acceptance.survivals(["new"], ["text"], 3)[0]
    assert first > 0.9
    assert second / first > 0.9
    assert third / second < 0.2


def test_what_a_request_shows_outweighs_what_others_showed():
    acceptance = Acceptance(["text"])
    observe_often(acceptance, "good", "text", 4, 4)
    observe_often(acceptance, "bad", "text", 4, 0)
    good, bad = acceptance.survivals(["good", "bad"], ["text"] * 2, 4)
    assert good[3] > 0.6
    assert bad[0] < 0.2


def test_positions_are_counted_against_drafts_offered_there():
    acceptance = Acceptance(["text"])
    # The second is right whenever it is reached, which is one time in four.
    for index in range(400):
        acceptance.observe("r", "text", 2, 2 if index % 4 == 0 else 0)
    first, second, _ = acceptance.rates("text")
    assert first == pytest.approx(0.25, abs=0.05)
    assert second > 0.9


def test_a_change_of_the_text_is_noticed_within_some_twenty_steps():
    acceptance = Acceptance(["text"])
    observe_often(acceptance, "r", "text", 1, 1, n=300)
    assert acceptance.survivals(["r"], ["text"], 1)[0, 0] > 0.9
    observe_often(acceptance, "r", "text", 1, 0, n=20)
    assert acceptance.survivals(["r"], ["text"], 1)[0, 0] < 0.45


def test_proposers_and_requests_are_kept_apart_and_forgotten_rows_start_anew():
    acceptance = Acceptance(["text", "model"])
    for index in range(200):  # more than fit at first
        acceptance.observe(f"r{index}", "text", 1, 0)
    observe_often(acceptance, "r0", "model", 2, 2)
    assert acceptance.survivals(["r0"], ["model"], 1)[0, 0] > 0.9
    assert acceptance.survivals(["r0"], ["text"], 1)[0, 0] < 0.1
    known = acceptance.survivals(["r0"], ["model"], 2)
    acceptance.forget("r0")
    assert acceptance.survivals(["r0"], ["model"], 2)[0, 1] < known[0, 1]


def test_slots_are_the_drafts_with_most_accepted_in_expectation():
    rng = np.random.default_rng(0)
    for _ in range(30):
        survivals = np.cumprod(rng.random((4, 3)), axis=1)
        caps = rng.integers(1, 4, 4)
        slots = DraftSlots.sort(survivals, caps)
        for number in range(int(caps.sum()) + 1):
            lengths = slots.lengths(number)
            assert lengths.sum() == number
            assert np.all(lengths <= caps)
            best = max(
                sum(survivals[row, :n].sum() for row, n in enumerate(chosen))
                for chosen in product(*(range(cap + 1) for cap in caps))
                if sum(chosen) == number
            )
            assert slots.survivals[:number].sum() == pytest.approx(best)


# What is decided


def test_text_is_asked_for_all_it_has_and_the_model_behind_it():
    policy = DraftPolicy([MODEL, TEXT, OTHER_TEXT], FLAT)
    candidates = [
        DraftCandidate("a", ("model", "other text", "text"), 6),
        DraftCandidate("b", ("text",), 99),
        DraftCandidate("c", ("model",), 2),
    ]
    assert policy.choose(candidates, decoding(3)) == {
        "a": (
            DraftRequest("other text", 4),
            DraftRequest("text", 6),
            DraftRequest("model", 4),
        ),
        "b": (DraftRequest("text", 8),),
        "c": (DraftRequest("model", 2),),
    }


def test_where_drafts_cannot_pay_only_text_is_asked_and_nothing_verified():
    policy = DraftPolicy([TEXT, MODEL], STEEP)
    candidates = [DraftCandidate("a", ("text", "model"), 4), DraftCandidate("b", ("model",), 4)]
    assert policy.choose(candidates, decoding(2)) == {"a": (DraftRequest("text", 4),)}
    assert policy.trim({"a": ("text", 4)}, decoding(2)) == {"a": 0}


def test_drafts_that_are_trimmed_to_nothing_still_teach():
    policy = DraftPolicy([TEXT], [(1, 0.010), (64, 0.520)])
    observe_often(policy, "r", "text", 1, 0)
    assert policy.trim({"r": ("text", 1)}, decoding(1)) == {"r": 0}
    for _ in range(60):
        policy.observe_unverified("r", "text", 1, 1)
    assert policy.trim({"r": ("text", 1)}, decoding(1)) == {"r": 1}


def test_the_better_request_gets_the_drafts_there_is_time_for():
    policy = DraftPolicy([TEXT], [(1, 0.010), (6, 0.011), (7, 0.030)])
    observe_often(policy, "good", "text", 4, 4)
    observe_often(policy, "bad", "text", 4, 0)
    assert policy.trim({"bad": ("text", 4), "good": ("text", 4)}, decoding(2)) == {
        "bad": 0,
        "good": 4,
    }


def test_a_flat_stretch_behind_a_jump_is_found():
    # Two more tokens cost as much as sixty.
    policy = DraftPolicy([TEXT], [(1, 0.010), (2, 0.020), (64, 0.020)])
    observe_often(policy, "r", "text", 8, 8)
    assert policy.trim({"r": ("text", 1)}, decoding(1)) == {"r": 0}
    assert policy.trim({"r": ("text", 8)}, decoding(1)) == {"r": 8}


def test_a_prompt_in_the_step_makes_no_drafts_worthwhile_that_are_not_so_without():
    policy = DraftPolicy([TEXT], [(1, 0.010), (512, 5.12)])
    policy.observe("r", "text", 1, 0)
    for num_tokens in (1, 256):
        assert policy.trim({"r": ("text", 4)}, StepLoad(num_tokens, 1)) == {"r": 0}


def test_text_that_misleads_gives_way_to_a_model_and_is_tried_again():
    policy = DraftPolicy([TEXT, MODEL], FLAT)
    observe_often(policy, "r", "text", 8, 0)
    observe_often(policy, "r", "model", 4, 4)
    asked = [
        policy.choose([DraftCandidate("r", ("text", "model"), 8)], decoding(1))["r"]
        for _ in range(130)
    ]
    assert asked.count((DraftRequest("model", 4),)) >= 120
    assert (DraftRequest("text", 8), DraftRequest("model", 4)) in asked


def test_a_pass_that_few_need_because_text_has_guesses_waits_until_text_has_none():
    slow = replace(MODEL, pass_seconds=0.005)  # worth it if many requests share a pass
    policy = DraftPolicy([TEXT, slow], FLAT)
    ids = [f"r{index}" for index in range(16)]
    candidates = [DraftCandidate(one, ("text", "model"), 1) for one in ids]
    for one in ids:
        observe_often(policy, one, "text", 8, 8, n=5)
    for has_guesses in (True, False):
        for _ in range(60):
            policy.trim({one: ("text", 1) for one in ids if has_guesses}, decoding(16))
            asked = policy.choose(candidates, decoding(16))
        num_asked = sum(DraftRequest("model", 1) in asks for asks in asked.values())
        assert num_asked <= 1 if has_guesses else num_asked == 16  # one may be on trial


def test_a_static_policy_asks_for_everything_and_verifies_everything():
    policy = DraftPolicy([TEXT, MODEL, OTHER_TEXT], STEEP, is_static=True)
    observe_often(policy, "r", "text", 4, 0)
    candidates = [DraftCandidate("r", ("text", "model", "other text"), 6)]
    for _ in range(3):
        assert policy.choose(candidates, decoding(200)) == {
            "r": (DraftRequest("text", 6), DraftRequest("model", 4))
        }
        assert policy.trim({"r": ("text", 6)}, decoding(200)) == {"r": 6}


def test_the_report_tells_what_was_learned():
    policy = DraftPolicy([TEXT, MODEL], FLAT)
    observe_often(policy, "r", "text", 1, 0)
    report = policy.report()
    assert report["target_seconds_1"] == pytest.approx(0.010)
    assert report["pass_seconds_model"] == pytest.approx(0.0001)
    assert report["acceptance_first_text"] < 0.1 < report["acceptance_first_model"]


# How it fares


@pytest.mark.parametrize("name", [s.name for s in STATIONARY if ", 3 running" in s.name])
def test_it_comes_within_five_per_cent_of_an_oracle(name: str):
    (scenario,) = (replace(s, num_steps=700) for s in STATIONARY if s.name == name)
    best, off = oracle(scenario), simulate(scenario, Off()).rate()
    rate = simulate(scenario, make_policy(scenario)).rate()
    assert rate > 0.95 * best
    assert rate > 0.99 * off


@pytest.mark.parametrize("name", [s.name for s in USELESS if ", 8 running" in s.name])
def test_drafts_that_are_no_use_cost_less_than_three_per_cent(name: str):
    (scenario,) = (replace(s, num_steps=1000) for s in USELESS if s.name == name)
    off = simulate(scenario, Off()).rate()
    assert simulate(scenario, make_policy(scenario)).rate() > 0.97 * off


def test_under_load_it_fades_out_and_afterwards_it_is_back_at_once():
    scenario = Scenario(
        "bursts",
        flat_then_linear,
        (text("text", always(0.7)), model("model", always(0.8), 0.1)),
        bursts,
        num_steps=1500,
    )
    result = simulate(scenario, make_policy(scenario))
    off = simulate(scenario, Off())
    always_four = simulate(scenario, Fixed(lambda request_id: [("text", 4)]))
    assert always_four.rate(500, 1000) < 0.7 * off.rate(500, 1000)  # the collapse
    assert result.rate(500, 1000) > 0.98 * off.rate(500, 1000)
    assert result.rate(500, 510) > 0.97 * off.rate(500, 510)
    before, after = result.rate(400, 500), result.rate(1002, 1040)
    assert before > 2 * off.rate(400, 500)
    assert after > 0.95 * before


def test_a_text_that_changes_is_followed_both_ways():
    for before, after in ((0.9, 0.1), (0.1, 0.9)):
        scenario = Scenario(
            "changing",
            linear,
            (text("text", changing(before, after, at=400)),),
            num_steps=800,
            lifetime=10_000,
        )
        result, off = simulate(scenario, make_policy(scenario)), simulate(scenario, Off())
        for accuracy, start, stop in ((before, 100, 400), (after, 450, 800)):
            gain = result.rate(start, stop) / off.rate(start, stop)
            assert gain > (1.12 if accuracy == 0.9 else 0.995), (before, after, accuracy)


def test_a_model_that_becomes_good_in_the_middle_of_a_request_is_found():
    scenario = Scenario(
        "changing",
        flat_then_linear,
        (model("model", changing(0.05, 0.9, at=600), 0.1),),
        num_steps=2500,
        lifetime=10_000,
    )
    result, off = simulate(scenario, make_policy(scenario)), simulate(scenario, Off())
    assert result.rate(100, 600) > 0.985 * off.rate(100, 600)
    assert result.rate(1500, 2500) > 1.8 * off.rate(1500, 2500)


def test_trying_a_model_that_never_pays_costs_less_than_one_per_cent():
    for share in (0.05, 0.5, 3.0):
        scenario = Scenario(
            "hopeless",
            flat_then_linear,
            (model("model", always(0.0), share),),
            num_steps=3000,
            lifetime=100,
        )
        result, off = simulate(scenario, make_policy(scenario)), simulate(scenario, Off())
        assert result.rate(500) > 0.99 * off.rate(500), share
        assert any(result.asked[500:]) or share == 3.0


def test_a_cost_that_the_model_cannot_see_is_caught_by_the_guard():
    scenario = Scenario(
        "hidden",
        flat,
        (text("text", always(0.6)),),
        steady(4),
        num_steps=3000,
        hidden_seconds=0.004,
    )
    off = simulate(scenario, Off())
    assert simulate(scenario, Fixed(lambda _: [("text", 4)])).rate() < 0.5 * off.rate()
    assert simulate(scenario, make_policy(scenario)).rate() > 0.97 * off.rate()


def test_the_same_measurements_give_the_same_decisions():
    scenario = Scenario(
        "all sorts",
        stepwise,
        (
            text("text", half(0.8, 0.2), chance=0.5),
            model("model", always(0.7), 0.1),
            model("other model", always(0.9), 0.3),
        ),
        lambda step: 1 + step // 40 % 5,
        num_steps=400,
        lifetime=90,
    )
    first, second = (simulate(scenario, make_policy(scenario), seed=3) for _ in range(2))
    assert first.asked == second.asked
    assert first.verified == second.verified


def test_any_sequence_of_calls_is_answered_within_its_limits():
    rng = random.Random(5)
    infos = [TEXT, MODEL, replace(MODEL, name="other model", num_tokens=2)]
    policy = DraftPolicy(infos, [(1, 0.010), (4, 0.012), (32, 0.060)])
    caps = {info.name: info.num_tokens for info in infos}
    drafts: dict[str, tuple[str, int]] = {}
    for _ in range(400):
        running = [f"r{rng.randint(0, 30)}" for _ in range(rng.randint(0, 6))]
        running = list(dict.fromkeys(running))
        drafts = {one: draft for one, draft in drafts.items() if one in running}
        load = decoding(max(1, len(running)))
        in_prompts = load._replace(num_tokens=load.num_tokens + rng.choice([0, 0, 300]))
        kept = policy.trim(drafts, in_prompts)
        assert kept.keys() == drafts.keys()
        assert all(0 <= kept[one] <= drafts[one][1] for one in drafts)
        candidates = [
            DraftCandidate(one, tuple(rng.sample(list(caps), rng.randint(1, 3))), rng.randint(1, 9))
            for one in running
        ]
        asked = policy.choose(candidates, load)
        for one in candidates:
            for ask in asked.get(one.request_id, ()):
                assert ask.proposer in one.proposers
                assert 1 <= ask.num_tokens <= min(one.max_tokens, caps[ask.proposer])
        for one, number in kept.items():
            if number:
                policy.observe(one, drafts[one][0], number, rng.randint(0, number))
            else:
                policy.observe_unverified(one, drafts[one][0], rng.randint(0, 1), 1)
        drafts = {
            one: (ask.proposer, rng.randint(1, ask.num_tokens))
            for one, asks in asked.items()
            for ask in rng.sample(asks, 1)
            if rng.random() < 0.8
        }
        if rng.random() < 0.3:
            policy.forget(f"r{rng.randint(0, 30)}")
