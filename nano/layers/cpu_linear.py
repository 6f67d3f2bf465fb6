"""PackedWeight: a linear layer's weight in the layout of our CPU kernel, and the op that uses it.

N outputs, K inputs, M rows; panels of 16 outputs, [ceil(N / 16), K, 16] (see cpu_linear.cpp).
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano.native.build import load_library

_SOURCE = Path(__file__).with_name("cpu_linear.cpp")
_PANEL = 16


class PackedWeight(nn.Module):
    """x [M, K] -> x @ weight.T + bias, [M, N], with equal bits for a row whatever M is.

    Weights that all fit bfloat16 are stored as such, which halves the memory traffic and changes
    no result: the arithmetic is float32 either way. `is_available` says whether the kernel is.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight: [N, K] float32; bias: [N] float32."""
        super().__init__()
        self.num_outputs = weight.shape[0]
        padding = -self.num_outputs % _PANEL
        panels = functional.pad(weight, (0, 0, 0, padding)).unflatten(0, (-1, _PANEL))
        panels = panels.transpose(1, 2)  # [N / 16, K, 16]
        if _fits_bfloat16(weight):
            pairs = panels.unflatten(-1, (2, _PANEL // 2)).transpose(2, 3)  # columns i and i + 8
            panels = pairs.to(torch.bfloat16).contiguous().flatten(2)
        self.register_buffer("packed", panels.contiguous(), persistent=False)
        padded = None if bias is None else functional.pad(bias, (0, padding))
        self.register_buffer("bias", padded, persistent=False)

    @staticmethod
    def is_available() -> bool:
        return _kernels() is not None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.nano.cpu_linear(x, self.packed, self.bias)
        return out[:, : self.num_outputs]


def linear_twin(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """What the kernel computes, in torch and up to rounding. For tests."""
    panels = packed
    if packed.dtype == torch.bfloat16:
        panels = packed.unflatten(-1, (_PANEL // 2, 2)).transpose(2, 3).flatten(2).float()
    return functional.linear(x, panels.transpose(1, 2).flatten(0, 1), bias)


def _fits_bfloat16(weight: Tensor) -> bool:
    return all(
        torch.equal(part.to(torch.bfloat16).to(torch.float32), part)
        for part in weight.split(4096)  # no second copy of a large matrix
    )


@cache
def _kernels() -> ctypes.CDLL | None:
    library = load_library(_SOURCE)
    if library is not None:
        for function in (library.nano_linear_float32, library.nano_linear_bfloat16):
            # Always declared: undeclared arguments are passed as 32-bit integers.
            function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_long] * 3
            function.restype = None
    return library


def _cpu_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    library = _kernels()
    assert library is not None
    num_panels, num_inputs, _ = packed.shape
    x = x.contiguous()
    out = torch.empty(x.shape[0], num_panels * _PANEL)
    is_bfloat16 = packed.dtype == torch.bfloat16
    kernel = library.nano_linear_bfloat16 if is_bfloat16 else library.nano_linear_float32
    kernel(
        x.data_ptr(),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        num_panels,
        num_inputs,
    )
    return out


_library = torch.library.Library("nano", "FRAGMENT")
_library.define("cpu_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_library.impl("cpu_linear", _cpu_linear, "CPU")
torch.library.register_fake(
    "nano::cpu_linear",
    lambda x, packed, bias: x.new_empty(x.shape[0], packed.shape[0] * _PANEL),
    lib=_library,
)
