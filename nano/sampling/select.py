"""Which sampling backend serves given logits."""

import torch

from nano.device import Transfers
from nano.sampling.backend import SamplingBackend
from nano.sampling.cpu_backend import CpuSampling
from nano.sampling.torch_backend import TorchSampling
from nano.sampling.torch_batch_backend import TorchBatchSampling
from nano.sampling.triton_backend import TritonSampling

_PREFERENCE: tuple[type[SamplingBackend], ...] = (
    CpuSampling,
    TritonSampling,
    TorchBatchSampling,
    TorchSampling,
)


def select_backend(
    dtype: torch.dtype, device: torch.device, transfers: Transfers | None = None
) -> SamplingBackend:
    """The first that can, which reaches `device` by `transfers` (None: main memory).

    The first call on a machine compiles the kernels.
    """
    kind = next(backend for backend in _PREFERENCE if backend.is_available(dtype, device))
    return kind(transfers)
