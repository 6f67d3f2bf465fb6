"""The sampler at the vocabularies of SmolLM2 (49k) and Qwen (152k): the kernels and their twin.

One thread. A step samples `num_rows` rows in one call; divide for the cost of a row.
"""

import pytest
import torch

from nano.native.build import load_threads
from nano.sampling.backend import SamplingBackend
from nano.sampling.cpu_backend import CpuSampling
from nano.sampling.sampler import Sampler
from nano.sampling.torch_backend import TorchSampling
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
CASES = [
    pytest.param(backend, num_rows, id=f"{backend.name}-{num_rows}")
    for backend, num_rows in ((CpuSampling, 1), (CpuSampling, 32), (TorchSampling, 1))
]


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "num_rows"), CASES)
def test_sample_rows(
    benchmark, backend: type[SamplingBackend], num_rows: int, kind: str, vocab_size: int
):
    if not backend.is_available(torch.float32, torch.device("cpu")):
        pytest.skip("needs a C++ compiler")
    torch.set_num_threads(1)
    pool = load_threads()
    if pool is not None:
        pool.nano_set_num_threads(1)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    prompt = list(range(500))
    params = [SamplingParams(seed=i, **KINDS[kind]) for i in range(num_rows)]
    rows, states = make_rows([(each, prompt, prompt) for each in params])
    benchmark(Sampler(backend=backend()).sample_rows, logits, rows, states)
