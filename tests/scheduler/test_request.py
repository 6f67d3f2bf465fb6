"""When a request ends, and what is kept of the tokens that came with the last one."""

import pytest

from nano.outputs import FinishReason
from nano.sampling_params import SamplingParams
from nano.scheduler.request import Request

EOS = (0, 1)


def make_request(max_num_tokens: int = 100, **params: object) -> Request:
    request = Request("a", [5, 6], SamplingParams(**params), eos_token_ids=EOS)  # type: ignore
    request.max_num_tokens = max_num_tokens
    return request


def test_a_request_copies_its_prompt() -> None:
    prompt = [1, 2]
    request = Request("a", prompt, SamplingParams())
    request.append([3])
    assert prompt == [1, 2]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (2, 3, 1)


@pytest.mark.parametrize("eos", EOS)
def test_eos_ends_a_request_and_drops_the_tokens_after_it(eos: int) -> None:
    request = make_request()
    assert request.append([7, eos, 8, 9]) == 2
    assert request.token_ids == [5, 6, 7, eos]
    assert (request.finish_reason, request.stop_token_id) == (FinishReason.STOP, None)


def test_a_stop_token_ends_a_request_and_is_named() -> None:
    request = make_request(stop_token_ids=[9])
    assert request.append([7, 9, 8]) == 2
    assert (request.finish_reason, request.stop_token_id) == (FinishReason.STOP, 9)


def test_an_eos_that_is_also_a_stop_token_counts_as_eos() -> None:
    request = make_request(stop_token_ids=[0])
    request.append([0])
    assert (request.finish_reason, request.stop_token_id) == (FinishReason.STOP, None)


def test_an_ignored_eos_is_a_token_like_any_other() -> None:
    request = make_request(ignore_eos=True)
    assert request.append([0, 7, 1]) == 3
    assert request.finish_reason is None


def test_an_ignored_eos_still_stops_as_a_stop_token() -> None:
    request = make_request(ignore_eos=True, stop_token_ids=[0])
    request.append([1, 0])
    assert (request.finish_reason, request.stop_token_id) == (FinishReason.STOP, 0)


def test_a_request_ends_with_length_at_its_limit() -> None:
    request = make_request(max_num_tokens=4)
    assert request.append([7, 8, 9]) == 2
    assert (request.finish_reason, request.token_ids) == (FinishReason.LENGTH, [5, 6, 7, 8])


def test_stop_wins_over_length_when_one_token_is_both() -> None:
    request = make_request(max_num_tokens=4)
    request.append([7, 0])
    assert request.finish_reason is FinishReason.STOP


def test_stops_do_not_count_before_min_tokens() -> None:
    request = make_request(min_tokens=3, stop_token_ids=[9])
    assert request.append([0, 9]) == 2
    assert request.finish_reason is None
    assert request.append([9, 7]) == 1
    assert (request.finish_reason, request.stop_token_id) == (FinishReason.STOP, 9)
