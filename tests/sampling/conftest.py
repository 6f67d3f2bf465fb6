import pytest
import torch

from nano.sampling.backend import SamplingBackend
from nano.sampling.cpu_backend import CpuSampling
from nano.sampling.torch_backend import TorchSampling

CPU = torch.device("cpu")


@pytest.fixture(params=[TorchSampling, CpuSampling], ids=lambda backend: backend.name)
def backend(request) -> SamplingBackend:
    """Each backend in turn: what is promised of sampling holds for both."""
    if not request.param.is_available(torch.float32, CPU):
        pytest.skip("needs a C++ compiler")
    return request.param()
