"""The token checks: what differs is found with its place and its gap, a near-tie is none."""

import math

import pytest
import torch

from nano.device.recording_graph import RecordingCpu
from nano.gpu_check import token_checks
from nano.gpu_check.modes import ASYNC, EAGER, FULL_GRAPHS, PIECEWISE
from nano.gpu_check.report import Outcome
from nano.gpu_check.token_checks import Asked, check_tokens, compare
from nano.layers.native_kernels import NativeKernels
from nano.outputs import CompletionOutput, Logprob
from nano.sampling.noise import log_exponential
from nano.sampling_params import SamplingParams
from nano.worker import worker
from tests.gpu_check.boxes import found, quiet_box

GREEDY = Asked([1, 2], SamplingParams(temperature=0.0))


@pytest.fixture
def only(monkeypatch):
    """Leaves only these modes."""

    def leave(*modes):
        monkeypatch.setattr(token_checks, "PLAIN_MODES", modes)
        monkeypatch.setattr(token_checks, "guessing_modes", tuple)
        monkeypatch.setattr(token_checks, "drafting_modes", lambda draft: ())

    return leave


def test_a_token_that_one_mode_flips_is_found_with_its_place_and_the_logit_gap(
    tmp_path, monkeypatch, only
):
    only(EAGER, ASYNC, PIECEWISE)
    answer = token_checks._answers

    def flip(box, folder, dtype, mode, requests):
        answers, _ = answer(box, folder, dtype, mode, requests)
        if mode is ASYNC:
            tops = answers[1].logprobs[5]
            answers[1].token_ids[5] = list(tops)[2]  # the second best: the first is told twice
            answers[1].token_ids[6:] = [0] * 6
        return answers, False

    monkeypatch.setattr(token_checks, "_answers", flip)
    box = quiet_box(tmp_path)
    check_tokens(box)
    (failure,) = found(box, Outcome.FAILED)
    assert failure.name == "tiny auto, async"
    assert failure.numbers["identical"] == 3
    assert "request 1 differs first at token 5" in failure.detail
    assert "logit gap" in failure.detail
    assert "piecewise" in found(box, Outcome.REFUSED)[0].name


def test_log_probabilities_that_move_are_a_failure_though_tokens_agree(tmp_path, monkeypatch, only):
    only(EAGER, ASYNC)
    answer = token_checks._answers

    def move(box, folder, dtype, mode, requests):
        answers, _ = answer(box, folder, dtype, mode, requests)
        if mode is ASYNC:
            tops = answers[2].logprobs[4]
            for token_id, one in tops.items():
                tops[token_id] = Logprob(one.logprob - 0.01, one.rank)
        return answers, False

    monkeypatch.setattr(token_checks, "_answers", move)
    box = quiet_box(tmp_path)
    check_tokens(box)
    (failure,) = found(box, Outcome.FAILED)
    assert failure.numbers["identical"] == 4
    assert failure.numbers["noise"] == pytest.approx(0.01)


@pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")
def test_modes_with_graphs_are_compared_where_a_device_has_graphs(tmp_path, monkeypatch, only):
    only(EAGER, FULL_GRAPHS, PIECEWISE)
    devices = []

    def make(*_):
        devices.append(RecordingCpu())
        return devices[-1]

    monkeypatch.setattr(worker, "make_device", make)
    box = quiet_box(tmp_path, num_requests=2, num_tokens=6)
    check_tokens(box)
    assert [f.name for f in found(box, Outcome.PASSED)] == [
        "tiny auto, eager",
        "tiny auto, full graphs",
        "tiny auto, piecewise graphs",
    ]
    replays = [sum(pool.num_replays for pool in device.pools) for device in devices]
    assert replays[0] == 0
    assert min(replays[1:]) > 0


def test_without_eager_answers_nothing_is_compared(tmp_path, monkeypatch, only):
    only(EAGER, ASYNC)
    answer = token_checks._answers

    def fail(box, folder, dtype, mode, requests):
        if mode is EAGER:
            raise RuntimeError("an illegal memory access")
        return answer(box, folder, dtype, mode, requests)

    monkeypatch.setattr(token_checks, "_answers", fail)
    box = quiet_box(tmp_path)
    check_tokens(box)
    assert "an illegal memory access" in found(box, Outcome.BROKEN)[0].detail
    assert found(box, Outcome.LEFT_OUT)[0].detail == (
        "nothing to compare with: eager gave no answers"
    )


def completion(*tokens: tuple[int, dict[int, float]]) -> CompletionOutput:
    logprobs = [{i: Logprob(value) for i, value in tops.items()} for _, tops in tokens]
    return CompletionOutput(0, "", [token_id for token_id, _ in tokens], logprobs=logprobs)


def test_the_gap_of_a_greedy_token_is_that_of_the_logits():
    wanted = completion((5, {5: -0.5, 6: -2.0}), (7, {7: -1.0, 8: -1.25}))
    ours = completion((5, {5: -0.625, 6: -2.0}), (8, {8: -1.0, 7: -1.5}))
    result = compare([wanted, ours], [wanted, wanted], [GREEDY, GREEDY])
    assert result.num_identical == 1
    assert result.noise == 0.5  # of token 7, where they part
    (divergence,) = result.divergences
    assert (divergence.request, divergence.position) == (1, 1)
    assert (divergence.token_id, divergence.expected_token_id) == (8, 7)
    assert result.gap == 0.25


def test_a_greedy_token_that_is_not_among_the_best_has_no_finite_gap():
    wanted, ours = completion((7, {7: -1.0, 8: -1.25})), completion((9, {9: -1.0, 6: -1.5}))
    assert compare([ours], [wanted], [GREEDY]).gap == math.inf


def test_the_gap_of_a_drawn_token_counts_its_noise():
    asked = Asked([1, 2, 3], SamplingParams(temperature=0.5, seed=9))
    noise = log_exponential(9, 3, torch.tensor([7, 8], dtype=torch.int32))
    # Token 8 lost the race by 0.125: log p - 0.5 * log E, twice.
    best = -1.0
    close = best - 0.5 * float(noise[0] - noise[1]) - 0.125
    wanted, ours = completion((7, {7: best, 8: close})), completion((8, {8: close, 7: best}))
    assert compare([ours], [wanted], [asked]).gap == pytest.approx(0.125, abs=1e-5)


def test_an_answer_that_ends_early_differs():
    long, short = completion((5, {5: -0.5}), (6, {6: -0.5})), completion((5, {5: -0.5}))
    result = compare([short], [long], [GREEDY])
    assert (result.num_identical, result.gap) == (0, math.inf)
    assert result.divergences[0].position == 1


def test_logits_that_are_not_numbers_are_infinitely_far():
    nan, good = completion((5, {5: math.nan})), completion((5, {5: -0.5}))
    assert compare([nan], [good], [GREEDY]).noise == math.inf
