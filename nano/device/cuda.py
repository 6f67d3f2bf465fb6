"""CudaDevice: one NVIDIA GPU, or one slice of one (MIG)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from nano.device.cuda_graph import CudaGraphPool
from nano.device.graph import GraphPool
from nano.device.reading import Reading
from nano.device.staging import PinnedMemory, Staging
from nano.device.transfers import HostCopy
from nano.errors import ConfigError
from nano.log import get_logger
from nano.native.threads import set_num_threads

logger = get_logger(__name__)

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What `--device` says: a place among the visible GPUs, or the name of the one to see."""

    index: int = 0
    uuid: str | None = None

    @classmethod
    def parse(cls, name: str) -> "DeviceChoice":
        """Of "cuda", "cuda:1", "GPU-<uuid>", "MIG-<uuid>". Raises `ConfigError`."""
        if name.startswith(("GPU-", "MIG-")):
            return cls(uuid=name)
        kind, colon, index = name.partition(":")
        if kind == "cuda" and (not colon or (index.isascii() and index.isdigit())):
            return cls(index=int(index or 0))
        raise ConfigError(
            "device must be 'cpu', 'cuda', 'cuda:<index>', or a UUID that begins with 'GPU-' or "
            f"'MIG-' (nvidia-smi -L lists them), got {name!r}"
        )

    def refusal(self, name: str, visible: list[str], is_built_with_cuda: bool) -> str | None:
        """Why `name` cannot be had where `visible` are the names of all GPUs; None if it can."""
        if not is_built_with_cuda:
            return f"device={name}: torch {torch.__version__} is built without CUDA"
        if not visible:
            said = os.environ.get(_VISIBLE)
            why = "is there a driver?" if said is None else f"{_VISIBLE}={said!r}"
            return f"device={name}: no GPU is visible ({why})"
        if self.index >= len(visible):
            listed = ", ".join(f"cuda:{i} {gpu}" for i, gpu in enumerate(visible))
            return f"device={name}: only {len(visible)} visible: {listed}"
        return None


class CudaDevice:
    """Everything is queued on the current stream; `synchronize` waits, and what is read back."""

    kind = "cuda"
    supports_graphs = True

    def __init__(self, name: str, num_threads: int | None = None):
        """`name` as `DeviceChoice.parse` takes it. Raises `ConfigError`."""
        choice = DeviceChoice.parse(name)
        if choice.uuid is not None:
            # CUDA shows a process one MIG slice, and only by this name, before it is initialised.
            if torch.cuda.is_initialized() and os.environ.get(_VISIBLE) != choice.uuid:
                raise ConfigError(f"device={name}: CUDA is in use already; set {_VISIBLE} instead")
            os.environ[_VISIBLE] = choice.uuid
        is_built = torch.backends.cuda.is_built()
        num_visible = torch.cuda.device_count() if is_built else 0
        visible = [torch.cuda.get_device_name(index) for index in range(num_visible)]
        refusal = choice.refusal(name, visible, is_built)
        if refusal is not None:
            raise ConfigError(refusal)
        self.torch_device = torch.device("cuda", choice.index)
        torch.cuda.set_device(self.torch_device)
        self.num_threads = set_num_threads(num_threads)  # of what is left on the host
        self.memory = CudaMemory(self.torch_device)
        pinned = PinnedMemory(
            lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event
        )
        self._staging = Staging(self.torch_device, pinned)
        self._reading = Reading(pinned)
        logger.info("device: cuda:%d, %s", choice.index, visible[choice.index])

    def to_device(self, array: np.ndarray) -> Tensor:
        """A copy of the array, queued; the caller may rewrite the array at once."""
        return self._staging.to_device(array)

    def to_host(self, tensors: Sequence[Tensor]) -> HostCopy:
        return self._reading.to_host(tensors)

    @property
    def traits(self) -> dict[str, str]:
        """The GPU, and who writes code for it."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return {
            "gpu": torch.cuda.get_device_name(self.torch_device),
            "capability": f"{major}.{minor}",
            "cuda": str(torch.version.cuda),
            "triton": version("triton") if find_spec("triton") is not None else "none",
        }

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def stream(self) -> torch.cuda.Stream:
        """A new queue beside the current one."""
        return torch.cuda.Stream(self.torch_device)

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def graph_pool(self) -> GraphPool:
        return CudaGraphPool(self.torch_device)

    def free_memory(self) -> int:
        return self.memory.free()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.torch_device)


class CudaMemory:
    """As `Memory` says."""

    def __init__(self, device: torch.device):
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
