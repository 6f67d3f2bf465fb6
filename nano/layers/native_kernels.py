"""The layers of a model on our own C++ ops: in float32, or multiplying in bfloat16. T tokens."""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nano.layers.cpu_linear import FloatWeight, W16A16Weight
from nano.layers.kernels import Kernels
from nano.native.build import load_ops

_ROWS = Path(__file__).with_name("cpu_rows.cpp")


class NativeKernels(Kernels):
    """A row's bits depend on nothing but the row, eagerly and compiled: the compiler of a graph is
    left no sum and no function to compute in its own way."""

    name = "native"

    @staticmethod
    def is_available() -> bool:
        """They need a C++ compiler, or a cache filled by one."""
        return _has_row_ops()

    def pack(self, weight: Tensor, bias: Tensor | None) -> FloatWeight:
        return FloatWeight.pack(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out: Tensor = torch.ops.nano.rms_norm(x, weight, eps)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = torch.ops.nano.silu_and_mul(gate_up)
        return out


class BFloat16Kernels(NativeKernels):
    """Linear layers round their inputs and weights to bfloat16, and sum the products in float32;
    everything between them stays float32."""

    name = "native bfloat16"

    @staticmethod
    def is_available() -> bool:
        return NativeKernels.is_available() and W16A16Weight.is_available()

    def pack(self, weight: Tensor, bias: Tensor | None) -> FloatWeight:
        return FloatWeight.pack(weight, bias, "w16a16")

    def between_layers(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32


@cache
def _has_row_ops() -> bool:
    if not load_ops(_ROWS):
        return False
    torch.library.register_fake("nano::rms_norm", lambda x, weight, eps: x.new_empty(x.shape))
    torch.library.register_fake(
        "nano::silu_and_mul",
        lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
    )
    return True
