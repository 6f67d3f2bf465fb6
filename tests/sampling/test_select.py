"""Which backend serves: the kernels where they can, torch everywhere else."""

import torch

from nano.sampling import cpu_backend
from nano.sampling.sampler import Sampler
from nano.sampling.select import select_backend
from nano.sampling_params import SamplingParams
from tests.sampling.rows import make_rows

CPU = torch.device("cpu")


def test_float64_is_served_by_torch():
    assert select_backend(torch.float64, CPU).name == "torch"


def test_without_a_compiler_torch_samples(monkeypatch):
    monkeypatch.setattr(cpu_backend, "load_ops", lambda source: False)
    assert select_backend(torch.float32, CPU).name == "torch"
    rows, states = make_rows([(SamplingParams(seed=0, top_k=1, logprobs=1), [1], [])])
    samples = Sampler().sample_rows(torch.tensor([[0.0, 2.0, 1.0]]), rows, states)
    assert samples.token_ids == [1]
    assert samples.logprobs[0] is not None


def test_with_one_float32_is_served_by_the_kernels(monkeypatch):
    monkeypatch.setattr(cpu_backend, "load_ops", lambda source: True)
    assert select_backend(torch.float32, CPU).name == "cpu"
