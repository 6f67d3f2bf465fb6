"""RowKernels: the promise without a compiler: torch's own functions, one row at a time. Slow.

What torch computes for a row depends on how many rows there are, and on where in memory they lie;
so each row is copied to memory of its own and computed alone. M rows, K inputs, N outputs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nano.layers.kernels import TorchKernels
from nano.layers.packed_weight import PackedWeight


class RowKernels(TorchKernels):
    """Norms are inherited: torch sums each vector in an order that only its size decides."""

    name = "rows"

    def pack(self, weight: Tensor, bias: Tensor | None) -> "RowWeight":
        return RowWeight(weight, bias)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        out: Tensor = torch.ops.nano.silu_and_mul_rows(gate_up)
        return out


class RowWeight(PackedWeight):
    """The weight as it is, multiplied by one row of x at a time."""

    format = "rows"
    weight: Tensor  # [N, K] float32
    bias: Tensor | None  # [N] float32

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.num_outputs, self.num_inputs = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.nano.linear_rows(x, self.weight, self.bias)
        return out

    def dequantized(self) -> Tensor:
        return self.weight


def _linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for row, to in zip(x, out):
        product = torch.mv(weight, row.clone())
        to.copy_(product if bias is None else product + bias)
    return out


def _silu_and_mul_rows(gate_up: Tensor) -> Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    for row, to in zip(gate_up, out):
        gate, up = row.chunk(2)
        to.copy_(functional.silu(gate.clone()) * up)
    return out


# Opaque ops: a traced graph has no loop over a number of rows that it does not know.
_library = torch.library.Library("nano", "FRAGMENT")
_library.define("linear_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define("silu_and_mul_rows(Tensor gate_up) -> Tensor")
_library.impl("linear_rows", _linear_rows, "CPU")
_library.impl("silu_and_mul_rows", _silu_and_mul_rows, "CPU")
torch.library.register_fake(
    "nano::linear_rows",
    lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]),
    lib=_library,
)
torch.library.register_fake(
    "nano::silu_and_mul_rows",
    lambda gate_up: gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2),
    lib=_library,
)
