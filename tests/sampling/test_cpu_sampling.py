"""The sampling kernels against definitions in float64, their torch twin, and themselves."""

import hashlib
import math

import numpy as np
import pytest
import torch

from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.native.build import load_threads
from nano.sampling.backend import NO_TOKEN
from nano.sampling.cpu_backend import CpuSampling
from nano.sampling.noise import log_exponential, random_bits
from nano.sampling.torch_backend import TorchSampling
from nano.sampling_params import SamplingParams
from nano.step import TokenLogprobs
from tests.other_cpus import AVX2, PLAIN, computed_with, needs_avx2
from tests.sampling.rows import make_rows

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not CpuSampling.is_available(torch.float32, CPU), reason="needs a C++ compiler"
)

SETTINGS: list[dict] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 20.0},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.999999},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700},
    {"min_p": 0.02},
    {"top_k": 40, "top_p": 0.7, "temperature": 1.5},
    {"top_k": 300, "top_p": 0.99, "min_p": 0.001, "temperature": 2.0},
]
# Around one vector, one block of 512, and many.
SIZES = [1, 7, 16, 511, 512, 513, 4000, 49_152]


def random_logits(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def rows_of(settings: list[dict], position: int = 4) -> tuple[LogitsRows, RequestStates]:
    prompt = list(range(position))
    return make_rows(
        [(SamplingParams(seed=i, **setting), prompt, []) for i, setting in enumerate(settings)]
    )


def draw(logits: torch.Tensor, rows: LogitsRows, states: RequestStates):
    processed = torch.empty(logits.shape)
    return CpuSampling().draw(logits, rows, states, processed).tolist(), processed


def logprobs(logits: torch.Tensor, *args) -> TokenLogprobs:
    found = CpuSampling().gather_logprobs(logits, *args)
    return TokenLogprobs(found.token_ids.tolist(), found.logprobs.tolist(), found.ranks.tolist())


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_are_the_twins_unless_the_race_is_within_rounding(setting, vocab_size):
    num_rows = 40 if vocab_size < 10_000 else 6
    logits = random_logits(num_rows, vocab_size, seed=vocab_size)
    rows, states = rows_of([setting] * num_rows)
    tokens, processed = draw(logits, rows, states)
    expected = TorchSampling().draw(logits, rows, states, None).tolist()
    ids = torch.arange(vocab_size, dtype=torch.int32)
    for i, (ours, twins) in enumerate(zip(tokens, expected)):
        if ours == twins:
            continue
        race = processed[i] - log_exponential(i, int(rows.num_known[i]), ids)
        assert float(race.max() - race[ours]) < 1e-5, f"row {i}"
    assert sum(a != b for a, b in zip(tokens, expected)) <= 1


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("setting", SETTINGS[1:], ids=str)
def test_truncation_keeps_what_its_definition_keeps(setting, vocab_size):
    logits = random_logits(3, vocab_size, seed=vocab_size + 1)
    rows, states = rows_of([setting] * 3)
    params = SamplingParams(**setting)
    _, processed = draw(logits, rows, states)
    for row, result in zip(logits, processed):
        scaled = (row - row.max()) / params.temperature
        kept = torch.isfinite(result)
        assert torch.equal(result[kept], scaled[kept])
        assert kept.any()
        allowed = torch.ones(vocab_size, dtype=torch.bool)
        if params.min_p:
            allowed &= scaled >= math.log(params.min_p)
        if 0 < params.top_k < vocab_size:
            allowed &= scaled >= scaled.topk(params.top_k).values[-1]
        if params.top_p == 1.0:
            assert torch.equal(kept, allowed)
            continue
        # The largest weights, all of the equal ones, and no fewer than hold top_p of the mass.
        weights = torch.where(allowed, scaled, -math.inf).double().exp()
        lightest = weights[kept].min()
        assert torch.equal(weights >= lightest * (1 - 1e-6), kept)
        mass = weights.sum()
        assert weights[kept].sum() >= (params.top_p - 1e-6) * mass
        assert weights[weights > lightest * (1 + 1e-6)].sum() < (params.top_p + 1e-6) * mass


def test_flat_logits_are_won_by_the_smallest_random_bits():
    # The twin's 32 bits, token by token: any other bit would elect another of 151,936.
    vocabulary = torch.arange(151_936, dtype=torch.int32)
    rows, states = rows_of([{}] * 20, position=9)
    tokens, _ = draw(torch.zeros(20, len(vocabulary)), rows, states)
    for seed, token in enumerate(tokens):
        bits = random_bits(seed, 9, vocabulary).numpy().view(np.uint32)
        assert token == int(bits.argmin())


def test_of_equal_logits_greedy_takes_the_first_and_truncation_keeps_all():
    logits = torch.full((4, 1000), -2.0)
    logits[:, [700, 300, 999]] = 5.0
    rows, states = rows_of([{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.2}, {"min_p": 0.9}])
    tokens, processed = draw(logits, rows, states)
    assert tokens[0] == 300
    for row in processed[1:]:
        assert torch.isfinite(row).nonzero().flatten().tolist() == [300, 700, 999]
    flat = torch.zeros(3, 1000)
    rows, states = rows_of([{"top_k": 2}, {"top_p": 0.2}, {"temperature": 0.0}])
    tokens, processed = draw(flat, rows, states)
    assert torch.isfinite(processed).all()
    assert tokens[2] == 0


@pytest.mark.parametrize("index", [0, 511, 512, 1022])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.nan])
def test_a_logit_that_is_not_a_number_anywhere_gives_no_token(index, bad):
    logits = random_logits(3, 1023, seed=0)
    logits[1, index] = bad
    for setting in ({"temperature": 0.0}, {"top_p": 0.9, "top_k": 5}):
        rows, states = rows_of([setting] * 3)
        tokens, _ = draw(logits, rows, states)
        assert [token == NO_TOKEN for token in tokens] == [False, True, False]


def test_banned_tokens_never_win_and_all_banned_gives_no_token():
    logits = torch.full((60, 800), -math.inf)
    logits[:, 650] = -3.0
    logits[:, 12] = -3.5
    logits[7] = -math.inf
    rows, states = rows_of([{"temperature": 5.0, "top_k": 50, "top_p": 0.9999}] * 60)
    tokens, _ = draw(logits, rows, states)
    assert tokens.pop(7) == NO_TOKEN
    assert set(tokens) == {12, 650}


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
def test_logits_of_any_size_are_sampled(scale):
    logits = torch.randn(6, 600, generator=torch.Generator().manual_seed(1)).clamp(-3, 3) * scale
    rows, states = rows_of([{"temperature": t} for t in (0.0, 1e-5, 1.0)] * 2)
    tokens, _ = draw(logits, rows, states)
    assert tokens == TorchSampling().draw(logits, rows, states, None).tolist()
    assert NO_TOKEN not in tokens


@pytest.mark.parametrize("vocab_size", SIZES)
def test_logprobs_equal_float64_and_list_the_lowest_of_equals_first(vocab_size):
    logits = random_logits(3, vocab_size, seed=vocab_size).round()  # many are equal
    token_ids = torch.tensor([0, vocab_size - 1, vocab_size // 2])
    expected = torch.log_softmax(logits.double(), dim=1)
    for num_top in {0, 1, min(5, vocab_size), min(100, vocab_size), vocab_size}:
        record = logprobs(logits, torch.tensor([2, 0, 1]), token_ids, num_top)
        for j, row in enumerate((2, 0, 1)):
            order = logits[row].sort(descending=True, stable=True).indices
            ids = [int(token_ids[j]), *order[:num_top].tolist()]
            assert record.token_ids[j] == ids
            got = torch.tensor(record.logprobs[j], dtype=torch.float64)
            torch.testing.assert_close(got, expected[row, ids], rtol=3e-7, atol=2e-7)
            assert record.ranks[j] == int((logits[row] > logits[row, ids[0]]).sum()) + 1


def test_logprobs_of_excluded_tokens_are_minus_infinity_and_nan_rows_give_nan():
    logits = torch.tensor([[1.0, -math.inf, 2.0], [1.0, math.nan, 2.0]])
    record = logprobs(logits, torch.tensor([0, 1]), torch.tensor([1, 0]), 3)
    assert record.token_ids[0] == [1, 2, 0, 1]
    assert record.logprobs[0][0] == record.logprobs[0][3] == -math.inf
    assert record.ranks[0] == 3
    assert all(math.isnan(value) for value in record.logprobs[1])
    assert sorted(record.token_ids[1][1:]) == [0, 1, 2]


def test_a_token_outside_the_vocabulary_is_refused():
    for token_id in (-1, 50):
        with pytest.raises(RuntimeError, match="vocabulary of 50"):
            CpuSampling().gather_logprobs(
                torch.zeros(1, 50), torch.tensor([0]), torch.tensor([token_id]), 0
            )


def test_penalties_are_the_twins_bit_by_bit():
    rng = np.random.default_rng(0)
    settings = [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "frequency_penalty": 0.4},
        {"frequency_penalty": -1.1, "presence_penalty": 0.9},
        {"presence_penalty": 2.0},
        {},
    ]
    requests = [
        (
            SamplingParams(**setting),
            rng.integers(0, 60, 40).tolist(),
            rng.integers(0, 60, n).tolist(),
        )
        for setting in settings
        for n in (0, 1, 90)
    ]
    rows, states = make_rows(requests)
    logits = random_logits(len(requests), 77, seed=0)
    index = np.flatnonzero(states.is_penalised[rows.row])
    assert len(index) == 12
    for num_ignored in (0, 1):  # the second time some known tokens are not yet there
        rows.num_known = np.maximum(rows.num_known - num_ignored, 40)
        ours, twins = logits.clone(), logits.clone()
        CpuSampling().penalise(ours, index, rows, states)
        TorchSampling().penalise(twins, index, rows, states)
        assert torch.equal(ours, twins)
        assert not torch.equal(ours, logits)
        assert torch.equal(ours[-3:], logits[-3:])


def everything(logits: torch.Tensor, picked: list[int]) -> list[list]:
    """All that sampling yields for the rows `picked`, in one call each; exact bits."""
    settings = [SETTINGS[i % len(SETTINGS)] for i in range(len(logits))]
    rows, states = rows_of(settings)
    part = LogitsRows(rows.row[picked], rows.num_known[picked])
    tokens, processed = draw(logits[picked], part, states)
    chosen = torch.tensor(tokens)
    record = logprobs(logits[picked], torch.arange(len(picked)), chosen, 7)
    return [
        [tokens[j], processed[j].numpy().tobytes(), record.token_ids[j], record.logprobs[j]]
        for j in range(len(picked))
    ]


@pytest.fixture
def num_threads():
    pool = load_threads()
    before = pool.nano_num_threads()
    yield pool.nano_set_num_threads
    pool.nano_set_num_threads(before)


def test_a_row_gives_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(num_threads):
    logits = random_logits(26, 5000, seed=3)
    num_threads(1)
    alone = [everything(logits, [i])[0] for i in range(26)]
    for threads in (1, 2, 3):
        num_threads(threads)
        order = np.random.default_rng(threads).permutation(26).tolist()
        assert everything(logits, order) == [alone[i] for i in order]


def test_rows_may_lie_apart_in_memory():
    logits = random_logits(26, 5000, seed=3)
    wide = torch.full((26, 5100), math.nan)
    wide[:, :5000] = logits
    rows, states = rows_of(SETTINGS * 2)
    apart, dense = draw(wide[:, :5000], rows, states), draw(logits, rows, states)
    assert apart[0] == dense[0]
    assert torch.equal(apart[1], dense[1])


def digest_and_tokens() -> tuple[str, list[int]]:
    rows = everything(random_logits(26, 5000, seed=3), list(range(26)))
    return hashlib.sha256(repr(rows).encode()).hexdigest(), [row[0] for row in rows]


@pytest.mark.slow
@needs_avx2
def test_vectors_of_eight_give_the_bits_of_vectors_of_sixteen():
    assert computed_with(AVX2, digest_and_tokens) == digest_and_tokens()


@pytest.mark.slow
@needs_avx2
def test_plain_vectors_without_fused_multiply_adds_draw_the_same_tokens():
    assert computed_with(PLAIN, digest_and_tokens)[1] == digest_and_tokens()[1]
