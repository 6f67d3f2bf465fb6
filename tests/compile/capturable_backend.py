"""CapturableCpuBackend: what a full graph asks of an attention backend, on a CPU."""

from torch import Tensor

from nano.attention.backend import AttentionMetadata, GraphSupport
from nano.attention.cpu_backend import CpuBackend


class CapturableCpuBackend(CpuBackend):
    """The CPU kernel, reading a graph's metadata where it lay at the capture."""

    graph_support = GraphSupport.FULL_DECODE

    def __init__(self, block_size: int, scale: float):
        super().__init__(block_size, scale)
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def plan_graph(self, metadata: AttentionMetadata, num_requests: int) -> None:
        super().plan_graph(metadata, num_requests)
        table, slots, *lengths, block_size, scale = self._step
        key = num_requests, metadata.max_query_len
        held = self._held.setdefault(key, tuple(x.clone() for x in lengths))
        for mine, given in zip(held, lengths):
            mine.copy_(given)
        self._step = (table, slots, *held, block_size, scale)
