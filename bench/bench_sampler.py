"""The sampler per row, at the vocabularies of SmolLM2 (49k) and Qwen (152k)."""

import pytest
import torch

from nano.sampling.sampler import Sampler
from nano.sampling_params import SamplingParams
from tests.sampling.rows import make_rows

KINDS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k_top_p": {"top_k": 50, "top_p": 0.95},
    "flat_top_p": {"top_p": 0.95, "temperature": 10.0},
    "penalties": {"repetition_penalty": 1.1, "temperature": 0.0},
    "logprobs": {"logprobs": 5, "temperature": 0.0},
}


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
@pytest.mark.parametrize("kind", KINDS)
def test_sample_one_row(benchmark, kind: str, vocab_size: int):
    torch.set_num_threads(1)
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    prompt = list(range(500))
    rows, states = make_rows([(SamplingParams(seed=1, **KINDS[kind]), prompt, prompt)])
    benchmark(Sampler().sample_rows, logits, rows, states)
