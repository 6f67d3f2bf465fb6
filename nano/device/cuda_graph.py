"""CudaGraph and the pool they share: the one place where CUDA captures."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nano.device.graph import Graph


class CudaGraph:
    """One `torch.cuda.CUDAGraph` in a shared pool."""

    def __init__(self, pool: Any):
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        # Other threads of the process may go on to use the device.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphPool:
    """Graphs of one model. They are replayed on the stream that is current then."""

    def __init__(self, device: torch.device):
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # nothing can be captured on the default one

    @contextmanager
    def capturing(self) -> Iterator[None]:
        # A tensor that is collected in the middle of a capture would be freed in it.
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize(self._device)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.synchronize(self._device)
            if was_enabled:
                gc.enable()

    def new_graph(self) -> Graph:
        return CudaGraph(self._handle)

    def alias(self, tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return tensor
        span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
        raw = _Raw(tensor.data_ptr(), span * tensor.element_size())
        memory = torch.as_tensor(raw, device=self._device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class _Raw:
    """Bytes on the device, as libraries show them to one another; torch copies nothing."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 2,
        }
