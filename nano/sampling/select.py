"""Which sampling backend serves given logits."""

import torch

from nano.sampling.backend import SamplingBackend
from nano.sampling.cpu_backend import CpuSampling
from nano.sampling.torch_backend import TorchSampling
from nano.sampling.triton_backend import TritonSampling

_PREFERENCE: tuple[SamplingBackend, ...] = (CpuSampling(), TritonSampling(), TorchSampling())


def select_backend(dtype: torch.dtype, device: torch.device) -> SamplingBackend:
    """The first that can. The first call on a machine compiles the kernels."""
    return next(backend for backend in _PREFERENCE if backend.is_available(dtype, device))
