"""The sampler against closed-form distributions on a 16-token vocabulary."""

import itertools
import math

import numpy as np
import pytest
import torch

from nano.model_input.input_batch import LogitsRows
from nano.sampling.backend import SamplingBackend
from nano.sampling.sampler import RowSamples, Sampler
from nano.sampling.torch_backend import TorchSampling
from nano.sampling_params import SamplingParams
from tests.sampling.rows import make_rows

V = 16
EOS = 3
BAD_WORD = (5, 9)  # token 9 right after token 5
PROMPT = [1, 2, 2, 7]
OUTPUT = [4, 4, 8, 5]
LOGITS = torch.randn(V, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2

# One or more settings of every parameter that changes the distribution.
SETTINGS: dict[str, list[dict]] = {
    "temperature": [{"temperature": 0.5}, {"temperature": 1.7}],
    "top_p": [{"top_p": 0.6}],
    "top_k": [{"top_k": 5}],
    "min_p": [{"min_p": 0.15}],
    "presence_penalty": [{"presence_penalty": 1.5}],
    "frequency_penalty": [{"frequency_penalty": -1.2}],
    "repetition_penalty": [{"repetition_penalty": 1.8}, {"repetition_penalty": 0.6}],
    "logit_bias": [{"logit_bias": {6: 4.5, 11: -100.0}}],
    "allowed_token_ids": [{"allowed_token_ids": (0, 3, 5, 8, 9, 12)}],
    "bad_words": [{"bad_words": ("any",)}],  # its token ids are BAD_WORD
    "min_tokens": [{"min_tokens": 5}],  # the output has four: one more is due
    "stop_token_ids": [{"stop_token_ids": (10,)}],
    "ignore_eos": [{"ignore_eos": True}],
}


def exact_distribution(params: SamplingParams) -> np.ndarray:
    """The distribution in plain float64, written from the documented order of operations."""
    x = LOGITS.numpy().copy()
    if params.allowed_token_ids is not None:
        x[[i for i in range(V) if i not in params.allowed_token_ids]] = -np.inf
    if params.bad_words:
        assert OUTPUT[-1] == BAD_WORD[0]
        x[BAD_WORD[1]] = -np.inf
    if len(OUTPUT) < params.min_tokens:
        x[[*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(PROMPT + OUTPUT):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(OUTPUT):
        x[token] -= params.frequency_penalty * OUTPUT.count(token) + params.presence_penalty
    x /= params.temperature
    if params.min_p:
        x[x < x.max() + math.log(params.min_p)] = -np.inf
    order = np.argsort(-x)
    if params.top_k:
        x[order[params.top_k :]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if params.top_p < 1.0:
        num_kept = int(np.argmax(np.cumsum(p[order]) >= params.top_p)) + 1
        p[order[num_kept:]] = 0.0
    return p / p.sum()


def sampled_distribution(backend: SamplingBackend, params: SamplingParams) -> np.ndarray:
    """The distribution the sampler drew from, read off its processed logprobs."""
    bad_words = (BAD_WORD,) if params.bad_words else ()
    rows, states = make_rows([(params, PROMPT, OUTPUT)], eos_token_ids=(EOS,), bad_words=bad_words)
    logits = LOGITS[None].to(torch.float64 if backend.name == "torch" else torch.float32)
    samples = Sampler("processed_logprobs", backend).sample_rows(logits, rows, states)
    record = samples.logprobs[0]
    p = np.zeros(V)
    assert record is not None
    p[record.token_ids[0][1:]] = np.exp(record.logprobs[0][1:])
    assert p[samples.token_ids[0]] > 0
    return p


def assert_draws_follow(token_ids: list[int], p: np.ndarray) -> None:
    """Chi-square within four sigma, and nothing drawn that has no probability."""
    counts, expected = np.bincount(token_ids, minlength=V), p * len(token_ids)
    assert counts[p == 0].sum() == 0
    cells = expected >= 5
    chi_square = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    degrees = int(cells.sum()) - 1
    assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees)


SINGLES = [setting for settings in SETTINGS.values() for setting in settings]
PAIRS = [
    {**first, **second}
    for a, b in itertools.combinations(SETTINGS, 2)
    for first in SETTINGS[a]
    for second in SETTINGS[b]
]


@pytest.mark.parametrize("setting", [{}, *SINGLES, *PAIRS], ids=str)
def test_every_parameter_alone_and_in_pairs_gives_the_exact_distribution(backend, setting):
    params = SamplingParams(seed=0, logprobs=-1, **setting)
    np.testing.assert_allclose(
        sampled_distribution(backend, params), exact_distribution(params), atol=1e-6
    )


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"temperature": 1.7},
        {"top_p": 0.8},
        {"top_k": 5, "temperature": 2.0},
        {"min_p": 0.05, "temperature": 1.5},
        {"logit_bias": {6: 1.0}},
        {"allowed_token_ids": (0, 3, 5, 8)},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(backend, setting):
    num_draws = 12_000
    params = SamplingParams(seed=11, **setting)
    _, states = make_rows([(params, PROMPT, OUTPUT)], eos_token_ids=(EOS,))
    # The same row at many positions: what a long generation from fixed logits would see.
    rows = LogitsRows(np.zeros(num_draws, np.int64), np.arange(num_draws) + 8)
    samples = Sampler(backend=backend).sample_rows(
        LOGITS.float().expand(num_draws, V), rows, states
    )
    assert_draws_follow(samples.token_ids, exact_distribution(params))


def test_seeds_draw_independently(backend):
    num_draws = 12_000
    requests = [(SamplingParams(seed=seed), PROMPT, OUTPUT) for seed in range(num_draws)]
    rows, states = make_rows(requests)
    samples = Sampler(backend=backend).sample_rows(
        LOGITS.float().expand(num_draws, V), rows, states
    )
    assert_draws_follow(samples.token_ids, exact_distribution(SamplingParams()))


def test_a_row_samples_the_same_token_alone_and_in_any_batch(backend):
    params = [
        SamplingParams(seed=seed, temperature=0.8 + 0.1 * seed, top_p=0.9, logprobs=3)
        for seed in range(12)
    ]
    logits = torch.randn(12, V, generator=torch.Generator().manual_seed(5))
    alone = []
    for i in range(12):
        rows, states = make_rows([(params[i], PROMPT, OUTPUT)])
        alone.append(Sampler(backend=backend).sample_rows(logits[i : i + 1], rows, states))
    order = np.random.default_rng(0).permutation(12)
    rows, states = make_rows([(params[i], PROMPT, OUTPUT) for i in order])
    together = Sampler(backend=backend).sample_rows(logits[torch.from_numpy(order)], rows, states)
    assert together.token_ids == [alone[i].token_ids[0] for i in order]
    assert together.logprobs == [alone[i].logprobs[0] for i in order]


def test_whatever_is_asked_of_a_row_reaches_no_other(backend):
    requests = [
        (SamplingParams(seed=i, logprobs=-1, **setting), PROMPT, OUTPUT[: 1 + i % 4])
        for i, setting in enumerate([{}, *SINGLES, {"temperature": 0.0}, *SINGLES, {}])
    ]
    logits = torch.randn(len(requests), V, generator=torch.Generator().manual_seed(5))
    found = []
    for picked in ([[i] for i in range(len(requests))], [list(range(len(requests)))]):
        samples = RowSamples()
        for part in picked:
            rows, states = make_rows(
                [requests[i] for i in part], eos_token_ids=(EOS,), bad_words=((5, 9), (4, 7))
            )
            sampler = Sampler("processed_logprobs", backend)
            samples.extend(sampler.sample_rows(logits[part], rows, states))
        found.append(samples)
    assert found[0] == found[1]


def test_noise_of_few_survivors_is_the_noise_of_all(monkeypatch):
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(2))
    requests = [(SamplingParams(seed=s, top_p=0.5, top_k=40), PROMPT, []) for s in range(5)]
    drawn = []
    for sparse in (0, 10**9):  # never, always by single tokens
        monkeypatch.setattr("nano.sampling.torch_backend._SPARSE", sparse)
        rows, states = make_rows(requests)
        drawn.append(Sampler(backend=TorchSampling()).sample_rows(logits, rows, states).token_ids)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-20, 0.0])
def test_a_vanishing_temperature_is_greedy_and_harms_no_neighbour(backend, temperature):  # B056
    logits = LOGITS.float()
    neighbour = SamplingParams(seed=4, temperature=1.0)
    rows, states = make_rows(
        [(SamplingParams(seed=1, temperature=temperature), PROMPT, []), (neighbour, PROMPT, [])]
    )
    samples = Sampler(backend=backend).sample_rows(torch.stack((logits, logits)), rows, states)
    alone, alone_states = make_rows([(neighbour, PROMPT, [])])
    expected = Sampler(backend=backend).sample_rows(logits[None], alone, alone_states).token_ids[0]
    assert samples.token_ids == [int(logits.argmax()), expected]
    assert not samples.errors


def test_top_k_off_is_spelt_minus_one_zero_or_more_than_the_vocabulary(backend):  # B058
    drawn = set()
    for top_k in (-1, 0, V, 10**6):
        requests = [(SamplingParams(seed=s, top_k=top_k), PROMPT, OUTPUT) for s in range(40)]
        rows, states = make_rows(requests)
        samples = Sampler(backend=backend).sample_rows(LOGITS.float().expand(40, V), rows, states)
        drawn.add(tuple(samples.token_ids))
    assert len(drawn) == 1
    rows, states = make_rows([(SamplingParams(seed=s, top_k=1), PROMPT, []) for s in range(5)])
    samples = Sampler(backend=backend).sample_rows(LOGITS.float().expand(5, V), rows, states)
    assert set(samples.token_ids) == {int(LOGITS.argmax())}


def test_raw_logprobs_ignore_every_sampling_parameter(backend):  # B064
    expected = torch.log_softmax(LOGITS.float(), 0)
    for setting in (
        {"temperature": 0.0},
        {"temperature": 0.5, "top_k": 1},
        {"temperature": 2.0, "top_k": 1, "top_p": 0.1},
    ):
        params = SamplingParams(seed=0, logprobs=5, repetition_penalty=1.5, **setting)
        rows, states = make_rows([(params, PROMPT, OUTPUT)])
        record = (
            Sampler(backend=backend).sample_rows(LOGITS.float()[None], rows, states).logprobs[0]
        )
        got = torch.tensor(record.logprobs[0])
        torch.testing.assert_close(got, expected[record.token_ids[0]])
        assert record.token_ids[0][1:] == expected.topk(5).indices.tolist()
        rank = int((expected > expected[record.token_ids[0][0]]).sum()) + 1
        assert record.ranks == [rank]


def test_penalties_count_what_they_should_at_the_first_token(backend):  # B060
    logits = torch.zeros(V)
    logits[PROMPT] = torch.tensor([1.0, 2.0, 2.0, -1.0])
    seen = SamplingParams(seed=0, logprobs=-1, repetition_penalty=1.3)
    counted = SamplingParams(seed=0, logprobs=-1, presence_penalty=2.0, frequency_penalty=2.0)
    rows, states = make_rows([(seen, PROMPT, []), (counted, PROMPT, [])])
    records = (
        Sampler("processed_logprobs", backend)
        .sample_rows(logits.expand(2, V), rows, states)
        .logprobs
    )
    penalised = logits.clone()
    penalised[[1, 2, 7]] = torch.tensor([1.0 / 1.3, 2.0 / 1.3, -1.0 * 1.3])
    for record, expected in zip(records, (penalised, logits)):
        got = torch.empty(V)
        got[record.token_ids[0][1:]] = torch.tensor(record.logprobs[0][1:])
        torch.testing.assert_close(got, torch.log_softmax(expected, 0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error_of_that_row_alone(backend, temperature):  # B069
    logits = LOGITS.float().repeat(3, 1)
    logits[1, 4] = float("nan")
    params = SamplingParams(seed=2, temperature=temperature, logprobs=1)
    rows, states = make_rows([(params, PROMPT, [])] * 1 + [(params, PROMPT, [1])] * 2)
    samples = Sampler(backend=backend).sample_rows(logits, rows, states)
    assert list(samples.errors) == [1]
    assert "not numbers" in samples.errors[1]
    clean, clean_states = make_rows([(params, PROMPT, []), (params, PROMPT, [1])])
    expected = Sampler(backend=backend).sample_rows(
        LOGITS.float().repeat(2, 1), clean, clean_states
    )
    assert [samples.token_ids[0], samples.token_ids[2]] == expected.token_ids


def test_restrictions_that_leave_no_token_are_an_error_that_says_so(backend):
    params = SamplingParams(seed=0, allowed_token_ids=(EOS,), min_tokens=2)
    rows, states = make_rows([(params, PROMPT, [])], eos_token_ids=(EOS,))
    samples = Sampler(backend=backend).sample_rows(LOGITS.float()[None], rows, states)
    assert "exclude all" in samples.errors[0]


def test_a_mask_bans_tokens_and_leaves_the_logits_untouched(backend):
    logits = LOGITS.float()[None].clone()
    before = logits.clone()
    mask = torch.zeros(1, V, dtype=torch.bool)
    mask[0, [2, 6]] = True
    rows, states = make_rows([(SamplingParams(temperature=0.0, seed=0), PROMPT, [])])
    samples = Sampler(backend=backend).sample_rows(logits, rows, states, mask)
    assert samples.token_ids[0] == (2 if LOGITS[2] > LOGITS[6] else 6)
    assert torch.equal(logits, before)


def test_a_bad_word_is_banned_only_where_it_would_be_completed(backend):  # B067
    params = SamplingParams(temperature=0.0, seed=0, bad_words=("any",), logprobs=-1)
    rows, states = make_rows(
        [(params, PROMPT, [4]), (params, PROMPT, [4, 5]), (params, [5], [])],
        bad_words=(BAD_WORD,),
    )
    records = (
        Sampler("processed_logprobs", backend)
        .sample_rows(LOGITS.float().repeat(3, 1), rows, states)
        .logprobs
    )
    banned = [
        math.isinf(dict(zip(r.token_ids[0][1:], r.logprobs[0][1:]))[BAD_WORD[1]]) for r in records
    ]
    assert banned == [False, True, False]
