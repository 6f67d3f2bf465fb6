"""FloatWeight: a linear layer's weight as floats, in the layout of our CPU kernels.

N outputs, K inputs, M rows. Outputs lie in panels of 64, the last one padded (see linear_kernel.h).
"""

from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from nano.layers.packed_weight import PANEL, PackedWeight
from nano.native.build import load_ops


class FloatWeight(PackedWeight):
    """Weights that are stored as floats, and summed up in float32."""

    stored_dtype: ClassVar[torch.dtype]
    packed: Tensor
    bias: Tensor | None  # [N] float32

    def __init__(self, packed: Tensor, bias: Tensor | None, num_outputs: int, num_inputs: int):
        super().__init__()
        if not self.is_available():
            raise RuntimeError(f"the kernel of format {self.format} needs a C++ compiler")
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.num_outputs, self.num_inputs = num_outputs, num_inputs

    @classmethod
    def is_available(cls) -> bool:
        """Whether the kernels are: they need a C++ compiler, or a cache filled by one."""
        return all(_has_op(name) for name, kind in FLOAT_FORMATS.items() if issubclass(kind, cls))

    @staticmethod
    def pack(
        weight: Tensor,
        bias: Tensor | None,
        format: Literal["float32", "bfloat16", "w16a16"] | None = None,
    ) -> "FloatWeight":
        """weight: [N, K] float32; bias: [N] float32.

        `format` None is bfloat16 if every weight fits it: half the memory traffic, and no result
        changes. "bfloat16" and "w16a16" round to the nearest what does not fit.
        """
        if format is None:
            format = "bfloat16" if fits_bfloat16(weight) else "float32"
        chosen = FLOAT_FORMATS[format]
        packed = chosen._pack(weight.detach().to(chosen.stored_dtype))
        return chosen(packed, None if bias is None else bias.detach(), *weight.shape)

    @staticmethod
    @abstractmethod
    def _pack(weight: Tensor) -> Tensor:
        """[N, K] -> as the kernel reads it."""


class Float32Weight(FloatWeight):
    """packed: [ceil(N / 64), K, 64] float32."""

    format = "float32"
    stored_dtype = torch.float32

    @staticmethod
    def _pack(weight: Tensor) -> Tensor:
        packed: Tensor = _panels(weight).transpose(1, 2).contiguous()
        return packed

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.nano.linear_float32(x, self.packed, self.bias, self.num_outputs)
        return out

    def dequantized(self) -> Tensor:
        return self.packed.transpose(1, 2).flatten(0, 1)[: self.num_outputs]


class BFloat16Weight(FloatWeight):
    """packed: [ceil(N / 64), ceil(K / 2), 64, 2] bfloat16: a pair of inputs side by side."""

    format = "bfloat16"
    stored_dtype = torch.bfloat16

    @staticmethod
    def _pack(weight: Tensor) -> Tensor:
        even = functional.pad(weight, (0, weight.shape[1] % 2))
        packed: Tensor = _panels(even).unflatten(2, (-1, 2)).transpose(1, 2).contiguous()
        return packed

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.nano.linear_bfloat16(x, self.packed, self.bias, self.num_outputs)
        return out

    def dequantized(self) -> Tensor:
        weight: Tensor = self.packed.transpose(1, 2).flatten(2).flatten(0, 1).float()
        return weight[: self.num_outputs, : self.num_inputs]


class W16A16Weight(FloatWeight):
    """As bfloat16 is packed; its inputs are rounded to bfloat16 as well."""

    format = "w16a16"
    stored_dtype = torch.bfloat16
    _pack = BFloat16Weight._pack
    dequantized = BFloat16Weight.dequantized

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.nano.linear_w16a16(x, self.packed, self.bias, self.num_outputs)
        return out


FLOAT_FORMATS: dict[str, type[FloatWeight]] = {
    chosen.format: chosen for chosen in (Float32Weight, BFloat16Weight, W16A16Weight)
}


def fits_bfloat16(weight: Tensor) -> bool:
    """Whether storing as bfloat16 changes no value."""
    return all(
        torch.equal(part.to(torch.bfloat16).to(weight.dtype), part)
        for part in weight.split(4096)  # no second copy of a large matrix
    )


def _panels(weight: Tensor) -> Tensor:
    """[N, K] -> [ceil(N / 64), 64, K]."""
    padded = functional.pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))
    panels: Tensor = padded.unflatten(0, (-1, PANEL))
    return panels


@cache
def _has_op(format: str) -> bool:
    if not load_ops(Path(__file__).with_name(f"{format}_linear.cpp")):
        return False
    torch.library.register_fake(
        f"nano::linear_{format}",
        lambda x, packed, bias, num_outputs: x.new_empty(x.shape[0], num_outputs),
    )
    return True
