"""Drafted requests through the sampler: who is judged, by what, and what comes out at each row."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from nano.sampling.acceptance import AcceptanceRule, SyntheticRule, make_rule
from nano.sampling.backend import NO_TOKEN
from nano.sampling.noise import NoiseDomain
from nano.sampling.sampler import RowSamples, Sampler
from nano.sampling.verification import probabilities
from nano.sampling_params import SamplingParams
from tests.sampling.chain import admit, draft, make_tables, rows_of, run, verify

V = 8
TARGET, DRAFT = make_tables(V)
MIXED = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.0),
    SamplingParams(seed=3, temperature=1.5, top_k=5),
    SamplingParams(seed=4, top_p=0.9, presence_penalty=0.5),
    SamplingParams(seed=5, temperature=0.7, min_p=0.05, logit_bias={2: 1.5}),
    SamplingParams(seed=6, temperature=0.0),
]


@pytest.fixture(params=["residual", "block"])
def rule(request) -> AcceptanceRule:
    made = make_rule(request.param)
    assert made is not None
    return made


def one_step(
    sampler: Sampler, params: Sequence[SamplingParams], tables=(TARGET, DRAFT), k: int = 3
) -> list[list[int]]:
    """New tokens per request after one step with k drafts."""
    states = admit(params, 16)
    counts = dict.fromkeys(range(len(params)), k)
    draft(sampler, states, tables[1], counts)
    return verify(sampler, states, tables[0], counts)


def seeds(count: int, **setting) -> list[SamplingParams]:
    return [SamplingParams(seed=seed, **setting) for seed in range(count)]


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.7, "temperature": 1.4}], ids=str)
def test_a_draft_that_is_the_target_is_accepted_whole(rule, backend, setting):
    tokens = one_step(Sampler(backend=backend, rule=rule), seeds(300, **setting), (TARGET, TARGET))
    assert {len(ids) for ids in tokens} == {4}


def test_a_draft_of_other_tokens_is_rejected_at_once_and_never_seen(rule, backend):
    tables = TARGET.clone(), TARGET.clone()
    tables[0][:, ::2] = tables[1][:, 1::2] = float("-inf")
    tokens = one_step(Sampler(backend=backend, rule=rule), seeds(300), tables)
    assert {len(ids) for ids in tokens} == {1}
    assert {ids[0] % 2 for ids in tokens} == {1}
    assert len({ids[0] for ids in tokens}) == V // 2


def test_a_target_that_is_sure_gives_its_token_whatever_the_draft(rule, backend):
    sure = torch.full((V, V), float("-inf"))
    sure[torch.arange(V), (torch.arange(V) + 1) % V] = 0.0
    tokens = one_step(Sampler(backend=backend, rule=rule), seeds(100), (sure, DRAFT))
    assert all(ids == list(range(1, len(ids) + 1)) for ids in tokens)
    assert len({len(ids) for ids in tokens}) > 1


def test_equal_distributions_with_nothing_left_give_the_target_itself(rule):
    # A draft that q could not give is rejected, and max(p - q, 0) is zero everywhere.
    states = admit([SamplingParams(seed=0)], 16)
    banned = TARGET.clone()
    banned[:, 5] = float("-inf")
    states.token_ids[0, 1] = 5
    states.draft_probs[0] = probabilities(banned[:1])
    (tokens,) = verify(Sampler(rule=rule), states, banned, {0: 1})
    assert len(tokens) == 1
    assert 0 <= tokens[0] < V
    assert tokens[0] != 5


def test_both_backends_give_the_same_tokens(rule):
    from nano.sampling.cpu_backend import CpuSampling
    from nano.sampling.torch_backend import TorchSampling

    if not CpuSampling.is_available(torch.float32, torch.device("cpu")):
        pytest.skip("needs a C++ compiler")
    counts = [(3, 3)] * 60
    params = seeds(60, temperature=1.2, top_p=0.95)
    by_backend = [
        run(Sampler(backend=backend, rule=rule), (TARGET, DRAFT), params, counts, 6)
        for backend in (CpuSampling(), TorchSampling())
    ]
    np.testing.assert_array_equal(*by_backend)


def test_a_request_gets_the_same_tokens_alone_and_in_any_batch(rule, backend):
    sampler = Sampler(backend=backend, rule=rule)
    params = [*MIXED, *seeds(6, temperature=1.1)]
    counts = [(1 + i % 4, 1 + i % 3 if i % 4 >= i % 3 else 1 + i % 4) for i in range(12)]
    together = run(sampler, (TARGET, DRAFT), params, counts, 8)
    for i in range(12):
        alone = run(sampler, (TARGET, DRAFT), params[i : i + 1], counts[i : i + 1], 8)
        np.testing.assert_array_equal(alone[0], together[i])


def test_greedy_requests_and_drafts_without_probabilities_are_matched(rule, backend):
    """They get the very tokens that no rule gives them, beside others that are judged."""
    without = [0, 1, 3]  # rows whose drafts come from text, the greedy row 1 among them
    drafts = np.random.default_rng(0).integers(0, V, (len(without), 3))
    found = []
    for sampler in (Sampler(backend=backend, rule=rule), Sampler(backend=backend)):
        states = admit(MIXED, 16)
        draft(sampler, states, DRAFT, {2: 3, 4: 3, 5: 3})
        states.token_ids[without, 1:4] = drafts
        found.append(verify(sampler, states, TARGET, dict.fromkeys(range(6), 3)))
    judged, matched = found
    for row in (*without, 5):
        assert judged[row] == matched[row]
    assert judged != matched


def test_the_token_behind_accepted_drafts_is_not_the_draft_that_was_rejected(rule, backend):
    # Where p(x) exceeds what q(x) asks for, x is accepted: the residual has nothing for it.
    states = admit(seeds(300), 16)
    counts = dict.fromkeys(range(300), 3)
    sampler = Sampler(backend=backend, rule=rule)
    draft(sampler, states, DRAFT, counts)
    drafts = states.token_ids[:, 1:4].tolist()
    tokens = verify(sampler, states, TARGET, counts)
    assert {len(ids) for ids in tokens} == {1, 2, 3, 4}
    for ids, guessed in zip(tokens, drafts):
        assert ids[:-1] == guessed[: len(ids) - 1]
        assert ids != guessed[: len(ids)]


def test_a_rule_ends_the_step_even_with_a_token_that_equals_the_next_draft():
    params = seeds(20, temperature=0.0)
    states = admit(params, 16)
    draft(Sampler(), states, TARGET, dict.fromkeys(range(20), 3))  # all as the target would
    never = Sampler(rule=SyntheticRule((0.0,), None))
    assert {len(t) for t in verify(never, states, TARGET, dict.fromkeys(range(20), 3))} == {1}


def test_only_the_verified_part_of_the_drafts_counts(rule, backend):
    sampler = Sampler(backend=backend, rule=rule)
    found = []
    for keep_all in (True, False):
        states = admit(seeds(50), 16)
        draft(sampler, states, DRAFT, dict.fromkeys(range(50), 4))
        if not keep_all:
            states.draft_probs = {row: probs[:2] for row, probs in states.draft_probs.items()}
            states.token_ids[:, 3:] = 0
        found.append(verify(sampler, states, TARGET, dict.fromkeys(range(50), 2)))
    assert found[0] == found[1]
    assert max(len(ids) for ids in found[0]) == 3


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_are_those_of_the_tokens_that_come_out(rule, backend, mode):
    setting = {"temperature": 1.5, "top_k": 5, "logprobs": 2}
    states = admit(seeds(40, **setting), 16)
    sampler = Sampler(mode, backend, rule)
    counts = dict.fromkeys(range(40), 3)
    draft(sampler, states, DRAFT, counts)
    rows = rows_of(states, np.arange(40), np.full(40, 4))
    logits = TARGET[states.token_ids[rows.row, rows.num_known - 1]]
    samples = sampler.sample_rows(logits, rows, states)
    source = logits.double()
    if mode == "processed_logprobs":
        source = source / 1.5
        source[source < source.topk(5).values[:, -1:]] = float("-inf")
    expected = torch.log_softmax(source, 1)
    for n in range(40):
        for i in range(4 * n, 4 * n + samples.num_accepted[4 * n] + 1):
            record, token_id = samples.logprobs[i], samples.token_ids[i]
            assert record is not None
            assert record.token_ids[0][0] == token_id
            assert record.logprobs[0][0] == pytest.approx(float(expected[i, token_id]), abs=1e-5)
            assert record.ranks[0] == int((expected[i] > expected[i, token_id]).sum()) + 1


def test_penalties_see_accepted_drafts_on_both_sides(backend):
    # A draft that comes from the target's own logits is accepted only if both sides count alike.
    setting = {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
    for name in ("residual", "block"):
        sampler = Sampler(backend=backend, rule=make_rule(name))
        tokens = one_step(sampler, seeds(40, **setting), (TARGET, TARGET), k=6)
        assert {len(ids) for ids in tokens} == {7}


def test_nan_ends_a_request_that_reaches_it_and_no_other(rule, backend):
    sampler = Sampler(backend=backend, rule=rule)
    found = []
    for is_spoilt in (False, True):
        states = admit(seeds(60), 16)
        draft(sampler, states, TARGET, dict.fromkeys(range(60), 3))  # all are accepted
        rows = rows_of(states, np.arange(60), np.full(60, 4))
        logits = TARGET[states.token_ids[rows.row, rows.num_known - 1]].clone()
        if is_spoilt:
            logits[[0, 6, 11], 1] = float("nan")  # first of request 0, third of 1, last of 2
        found.append(sampler.sample_rows(logits, rows, states))
    clean, spoilt = found
    assert list(spoilt.errors) == [0, 6, 11]
    assert 0 not in spoilt.num_accepted  # its first row says it all
    assert [spoilt.num_accepted[first] for first in (4, 8)] == [2, 3]  # they end at the failed row
    assert spoilt.token_ids[4:6] == clean.token_ids[4:6]
    assert spoilt.token_ids[8:11] == clean.token_ids[8:11]
    assert spoilt.token_ids[12:] == clean.token_ids[12:]


def test_drafts_under_the_match_rule_are_the_tokens_the_target_would_sample(backend):
    states = admit(MIXED, 16)
    rows = rows_of(states, np.arange(6), np.full(6, 1))
    for rule in (None, SyntheticRule((0.5,), None)):
        sampler = Sampler(backend=backend, rule=rule)
        token_ids, probs = sampler.sample_drafts(TARGET[:6], rows, states)
        assert probs is None
        assert token_ids.tolist() == sampler.sample_rows(TARGET[:6], rows, states).token_ids


def test_drafts_come_with_what_they_were_drawn_from(rule, backend):
    states = admit(MIXED, 16)
    rows = rows_of(states, np.arange(6), np.full(6, 1))
    logits = TARGET[:6].clone()
    logits[4, 2] = float("nan")
    token_ids, probs = Sampler(backend=backend, rule=rule).sample_drafts(logits, rows, states)
    assert probs is not None
    assert probs.dtype == torch.float32
    is_greedy = [1, 5]
    assert token_ids[is_greedy].tolist() == logits[is_greedy].argmax(1).tolist()
    assert token_ids[4] == NO_TOKEN
    assert not probs[[1, 4, 5]].any()
    torch.testing.assert_close(probs[0], torch.softmax(logits[0], 0))
    assert (probs[2] > 0).sum() == 5
    torch.testing.assert_close(probs[[0, 2, 3]].sum(1), torch.ones(3))


def test_greedy_drafts_need_no_probabilities(rule, backend):
    states = admit(MIXED[1:2], 16)
    rows = rows_of(states, np.arange(1), np.ones(1, np.int64))
    token_ids, probs = Sampler(backend=backend, rule=rule).sample_drafts(TARGET[:1], rows, states)
    assert (token_ids.tolist(), probs) == ([int(TARGET[0].argmax())], None)


def test_draft_noise_is_not_the_targets_own(rule):
    states = admit(seeds(3000), 16)
    rows = rows_of(states, np.arange(3000), np.ones(3000, np.int64))
    logits = torch.zeros(3000, V)
    own = Sampler().sample_rows(logits, rows, states).token_ids
    drafts, _ = Sampler(rule=rule).sample_drafts(logits, rows, states)
    share = np.mean(np.array(own) == drafts.numpy())
    assert abs(share - 1 / V) < 4 * math.sqrt(1 / V * (1 - 1 / V) / 3000)


@pytest.mark.parametrize("domain", list(NoiseDomain))
def test_noise_is_keyed_by_position_except_where_block_verification_must_not(domain):
    states = admit([SamplingParams(seed=3)], 16)
    row = np.zeros(3, np.int64)

    def keys(name: str, num_verifications: int, num_tokens: int) -> set[tuple[int, int]]:
        states.num_verifications[0], states.num_tokens[0] = num_verifications, num_tokens
        rule = make_rule(name)
        assert rule is not None
        return set(zip(*rule.noise_keys(domain, states, row, num_tokens + np.arange(3))))

    for name in ("residual", "block"):
        first, second = keys(name, 0, 1), keys(name, 1, 2)  # positions 1 to 3, then 2 to 4
        is_fresh = name == "block" and domain != NoiseDomain.RESIDUAL
        assert len(first & second) == (0 if is_fresh else 2)
        assert (keys(name, 0, 9) == first) == is_fresh  # by the place in the draft


def test_chunks_of_whole_requests_give_what_one_call_gives(rule):
    sampler = Sampler(rule=rule)
    states = admit(seeds(9), 16)
    draft(sampler, states, DRAFT, dict.fromkeys(range(9), 3))
    rows = rows_of(states, np.arange(9), np.full(9, 4))
    logits = TARGET[states.token_ids[rows.row, rows.num_known - 1]]
    parts = RowSamples()
    for start, end in ((0, 4), (4, 24), (24, 36)):
        parts.extend(sampler.sample_rows(logits[start:end], rows.chunk(start, end), states))
    assert parts == sampler.sample_rows(logits, rows, states)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance_keeps_any_drafts_at_its_rates(backend, temperature):
    num_requests, rates = 1500, (0.8, 0.4)
    states = admit(seeds(num_requests, temperature=temperature), 16)
    states.token_ids[:, 1:4] = 7
    counts = dict.fromkeys(range(num_requests), 3)
    tokens = verify(
        Sampler(backend=backend, rule=SyntheticRule(rates, None)), states, TARGET, counts
    )
    lengths = np.array([len(ids) for ids in tokens])
    assert all(ids[:-1] == [7] * (len(ids) - 1) for ids in tokens)
    for position, rate in enumerate(rates):
        assert abs((lengths > position + 1).mean() - rate) < 4 * 0.5 / math.sqrt(num_requests)
    assert lengths.max() == 3


@pytest.mark.parametrize("vocab_size", [V, 60_000])
def test_probabilities_of_a_row_are_the_same_bits_in_any_batch(vocab_size):
    logits = 4 * torch.randn(9, vocab_size, generator=torch.Generator().manual_seed(0))
    together = probabilities(logits)
    assert all(torch.equal(probabilities(logits[i : i + 1])[0], together[i]) for i in range(9))


def test_without_drafts_a_rule_changes_nothing(rule, backend):
    states = admit(MIXED, 16)
    rows = rows_of(states, np.arange(6), np.ones(6, np.int64))
    plain = Sampler(backend=backend).sample_rows(TARGET[:6], rows, states)
    judged = Sampler(backend=backend, rule=rule).sample_rows(TARGET[:6], rows, states)
    assert judged == plain
