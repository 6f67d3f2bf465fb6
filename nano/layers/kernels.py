"""Kernels: what the layers of a model compute with, chosen once, before the model runs.

`TorchKernels` serve any dtype and device; the last bits of a row may depend on its batch. The
others promise that they do not: `NativeKernels` and `BFloat16Kernels` (native_kernels.py) and,
where there is no C++ compiler, the slow twin of the former, `RowKernels` (row_kernels.py).
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from nano.layers.packed_weight import PackedWeight


class Kernels(ABC):
    """The functions in which one way of computing differs from another. T tokens."""

    name: ClassVar[str]  # in logs and the numerics id

    @abstractmethod
    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedWeight | None:
        """A linear layer's parameters as these kernels read them; None: as they are."""

    def between_layers(self, dtype: torch.dtype) -> torch.dtype:
        """Of what layers hand on in a model that computes in `dtype`."""
        return dtype

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [T, size] or [T, H, size]: each vector at unit root mean square, times `weight`."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu(first half) * second half."""


class TorchKernels(Kernels):
    """torch's own, in whatever dtype the model computes."""

    name = "torch"

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedWeight | None:
        return None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Computed in float32 or wider. The scaled vector is rounded to x's dtype *before* the
        weight multiplies it, as in Hugging Face; in bfloat16 the other order gives other bits."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
