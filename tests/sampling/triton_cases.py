"""The sampling kernels against their torch twin. Run by test_triton_sampling.py."""

import pytest
import torch
import triton
import triton.language as tl

from nano.sampling import triton_backend
from nano.sampling.backend import NO_TOKEN
from nano.sampling.noise import log_exponential_from_bits, random_bits
from nano.sampling.torch_backend import TorchSampling
from nano.sampling.triton_backend import TritonSampling
from nano.sampling.triton_kernels import log_exponential, row_keys
from nano.sampling.triton_kernels import random_bits as bits_of
from nano.sampling_params import SamplingParams
from tests.sampling.rows import make_rows
from tests.triton_interpreter import mend_interpreter

mend_interpreter()
VOCABULARY = 300
KEYS = [(0, 0), (7, 12345), (2**63 - 1, 131071), (-(2**63), 1), (-1, 3)]
# temperature, top_p, min_p, top_k
DRAWS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.8},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 2.0, "min_p": 0.2, "top_k": 40, "top_p": 0.9},
    {"temperature": 1e-4},
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(triton_backend, "CHUNK", 128)


@triton.jit
def _noise(seeds, positions, bits, noise, SIZE: tl.constexpr):  # noqa: N803
    row, ids = tl.program_id(0), tl.arange(0, SIZE)
    first, second = row_keys(tl.load(seeds + row), tl.load(positions + row))
    drawn = bits_of(first, second, ids - 5)
    tl.store(bits + row * SIZE + ids, drawn.to(tl.int32, bitcast=True))
    tl.store(noise + row * SIZE + ids, log_exponential(drawn))


def test_the_noise_of_a_key_is_the_same_as_in_torch():
    seeds, positions = torch.tensor(KEYS).T.contiguous()
    bits = torch.empty(len(KEYS), 64, dtype=torch.int32)
    noise = torch.empty(len(KEYS), 64)
    _noise[(len(KEYS),)](seeds, positions, bits, noise, SIZE=64)
    for i, key in enumerate(KEYS):
        wanted = random_bits(*key, torch.arange(64, dtype=torch.int32) - 5)
        assert torch.equal(bits[i], wanted)
        torch.testing.assert_close(
            noise[i], log_exponential_from_bits(wanted), rtol=1e-6, atol=1e-6
        )


@triton.jit
def _log_exponential(bits, noise, SIZE: tl.constexpr):  # noqa: N803
    ids = tl.arange(0, SIZE)
    tl.store(noise + ids, log_exponential(tl.load(bits + ids).to(tl.uint32, bitcast=True)))


def test_the_extremes_of_noise_are_finite_and_as_fine_as_in_torch():
    bits = torch.tensor([0, 1, 2, 65535, 65536, 2**31 - 1, -(2**31), -256, -129, -128, -2, -1])
    bits = torch.cat([bits, bits[:4]]).to(torch.int32)
    noise = torch.empty(16)
    _log_exponential[(1,)](bits, noise, SIZE=16)
    assert noise.isfinite().all()
    torch.testing.assert_close(noise, log_exponential_from_bits(bits), rtol=1e-6, atol=2e-7)


def make_step(num_rounds: int = 3):
    """Rows of all kinds side by side, with banned tokens and ties among them."""
    requests = [
        (SamplingParams(seed=100 * n + i, **draw), [1, 2, 3][: 1 + n % 3], [4] * n)
        for n in range(num_rounds)
        for i, draw in enumerate(DRAWS)
    ]
    rows, states = make_rows(requests)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(requests), VOCABULARY, generator=generator) * 3
    logits[:, 17:40] = -torch.inf
    logits[:6, [3, 200]] = 20.0  # equals, in two chunks
    return logits, rows, states


def test_every_kind_of_row_draws_the_token_that_torch_draws():
    logits, rows, states = make_step()
    ours, theirs = torch.full_like(logits, 77.0), torch.full_like(logits, 77.0)
    tokens = TritonSampling().draw(logits, rows, states, ours).tolist()
    assert tokens == TorchSampling().draw(logits, rows, states, theirs).tolist()
    assert torch.equal(ours, theirs)
    assert tokens == TritonSampling().draw(logits, rows, states, None).tolist()
    assert len(set(tokens)) > 10
    assert tokens[0] == 3  # greedy: of equals the lowest


def test_a_row_draws_the_same_token_alone_and_in_chunks_of_any_size(monkeypatch):
    logits, rows, states = make_step(2)
    wanted = TritonSampling().draw(logits, rows, states, None).tolist()
    monkeypatch.setattr(triton_backend, "CHUNK", 512)
    for i in range(len(wanted)):
        part = rows.chunk(i, i + 1)
        assert (
            TritonSampling().draw(logits[i : i + 1], part, states, None).tolist()
            == wanted[i : i + 1]
        )


def test_rows_without_a_finite_best_logit_give_no_token():
    logits, rows, states = make_step(2)
    logits[0, 250] = float("nan")
    logits[1, 3] = float("nan")
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    tokens = TritonSampling().draw(logits, rows, states, None).tolist()
    assert tokens[:4] == [NO_TOKEN] * 4
    assert tokens == TorchSampling().draw(logits, rows, states, None).tolist()


def test_rows_may_be_part_of_wider_ones():
    logits, rows, states = make_step(1)
    wide = torch.cat([logits, torch.full((len(logits), 9), 99.0)], 1)
    assert (
        TritonSampling().draw(wide[:, :VOCABULARY], rows, states, None).tolist()
        == TritonSampling().draw(logits, rows, states, None).tolist()
    )
