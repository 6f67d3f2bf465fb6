import pytest
import torch

from nano.sampling.backend import SamplingBackend
from nano.sampling.cpu_backend import CpuSampling
from nano.sampling.torch_backend import TorchSampling
from nano.sampling.torch_batch_backend import TorchBatchSampling

CPU = torch.device("cpu")


BACKENDS = [TorchSampling, TorchBatchSampling, CpuSampling]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request) -> SamplingBackend:
    """Each backend in turn: what is promised of sampling holds for all.

    What is made for devices is as good here as on one.
    """
    if request.param is CpuSampling and not CpuSampling.is_available(torch.float32, CPU):
        pytest.skip("needs a C++ compiler")
    return request.param()
