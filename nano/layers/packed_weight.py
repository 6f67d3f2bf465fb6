"""PackedWeight: a linear layer's weight in the layout that one of our CPU kernels reads.

M rows, K inputs, N outputs. The formats that hold floats are in `cpu_linear.py`, the quantised ones
in `nano/quant/`. All keep one promise: a row of the result has the same bits whatever M is, and on
any number of threads.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

PANEL = 64  # outputs that every format stores side by side (see linear_kernel.h)


class PackedWeight(nn.Module, ABC):
    """x [M, K] -> x @ weight.T + bias, [M, N] float32, by the op of this format."""

    format: ClassVar[str]  # as it is called in logs and the numerics id
    num_outputs: int
    num_inputs: int

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """x: [M, K] float32."""

    @abstractmethod
    def dequantized(self) -> Tensor:
        """[N, K] float32: the very numbers that the kernel multiplies by."""
