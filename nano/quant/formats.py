"""FORMATS: every packed format by its name, and `pack`, which chooses one.

| format | weights | activations | result |
|---|---|---|---|
| float32, bfloat16 | floats | float32 | one chain of fused multiply-adds for each output |
| w16a16 | bfloat16 | bfloat16 | one chain of float32 sums of two products |
| int8 | `Symmetric8` | float32 | the bits of its dequantised matrix in float32 |
| int4 | `Affine4` | float32 | the bits of its dequantised matrix in float32 |
| w8a8 | `Symmetric8`, a scale per output | 8 bits, a scale per row | integers, scaled |
| w4a8 | `Affine4` | 8 bits, a scale per 32 inputs of a row | integers of 32 inputs, then a chain |
| split | several of these over consecutive outputs | | theirs, side by side |

Where float32 multiplies, a step of one row waits for memory, one of five for the multipliers. The
two with 8-bit activations take several times less per row: they are for speculation and long
prompts, and what they cost is the activations' rounding.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from nano.layers.cpu_linear import FLOAT_FORMATS, FloatWeight
from nano.layers.packed_weight import PackedWeight
from nano.quant.int4_weight import Int4Weight, W4A8Weight
from nano.quant.int8_weight import Int8Weight, W8A8Weight
from nano.quant.records import Affine4, Record

_AFFINE4: dict[str, type[Int4Weight]] = {kind.format: kind for kind in (Int4Weight, W4A8Weight)}
_SYMMETRIC8: dict[str, type[Int8Weight]] = {kind.format: kind for kind in (Int8Weight, W8A8Weight)}


class SplitWeight(PackedWeight):
    """Parts over consecutive outputs of the same inputs; their results are concatenated.

    A GGUF stores the projections that nano fuses (q, k, v; gate, up) each in a type of its own.
    """

    format = "split"

    def __init__(self, parts: Sequence[PackedWeight]):
        super().__init__()
        self._parts = nn.ModuleList(parts)
        self.num_outputs = sum(part.num_outputs for part in parts)
        self.num_inputs = parts[0].num_inputs
        if any(part.num_inputs != self.num_inputs for part in parts):
            raise ValueError(f"parts of {[part.num_inputs for part in parts]} inputs")

    @property
    def parts(self) -> list[PackedWeight]:
        return [cast(PackedWeight, part) for part in self._parts]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=1)

    def dequantized(self) -> Tensor:
        return torch.cat([part.dequantized() for part in self.parts])


FORMATS: dict[str, type[PackedWeight]] = {
    **FLOAT_FORMATS,
    **_AFFINE4,
    **_SYMMETRIC8,
    SplitWeight.format: SplitWeight,
}


def pack(matrix: Record | Tensor, bias: Tensor | None, format: str | None = None) -> PackedWeight:
    """A record or a float32 [N, K] in `format`; None: as they are, multiplied in float32.

    bias: [N] float32. Raises `ValueError` for a format that cannot hold the matrix.
    """
    if isinstance(matrix, Tensor):
        if format not in (None, *FLOAT_FORMATS):
            raise ValueError(f"floats in format {format}: quantise them first")
        return FloatWeight.pack(matrix, bias, cast(Any, format))
    if isinstance(matrix, Affine4):
        return _AFFINE4[_checked(format or "int4", _AFFINE4)].pack(matrix, bias)
    return _SYMMETRIC8[_checked(format or "int8", _SYMMETRIC8)].pack(matrix, bias)


def _checked(format: str, formats: Iterable[str]) -> str:
    if format not in formats:
        raise ValueError(f"format {format} does not hold such a record; {', '.join(formats)} do")
    return format
