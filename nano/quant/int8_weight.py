"""8-bit weights, multiplied by float32 activations, exactly, or by 8-bit ones, fast.

N outputs, K inputs, P panels of 64 outputs, G groups.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor

from nano.quant.quantized_weight import QuantizedWeight, as_float16_if_exact, to_panels
from nano.quant.records import Symmetric8


class Int8Weight(QuantizedWeight):
    """A `Symmetric8` record, with float32 arithmetic: the bits of the dequantised matrix.

    packed: [P, ceil(K / 4), 64, 4] int8; scales: [P, G, 64].
    """

    format = "int8"
    kernels: ClassVar[tuple[str, ...]] = ("int8",)
    inputs_per_word = 4

    @classmethod
    def pack(cls, record: Symmetric8, bias: Tensor | None) -> Self:
        """bias: [N] float32."""
        cls.check(record)
        words = to_panels(record.q, cls.inputs_per_word).unflatten(2, (-1, 4))
        return cls(
            words.transpose(1, 2).contiguous(),
            cls.stored_scales(to_panels(record.scale).transpose(1, 2).contiguous()),
            bias,
            (record.q.shape[0], record.q.shape[1]),
            record.group_size,
        )

    @classmethod
    def check(cls, record: Symmetric8) -> None:
        num_inputs = record.q.shape[1]
        if record.group_size % 16 and record.group_size < num_inputs:
            raise ValueError(
                f"groups of {record.group_size} inputs; {cls.format} takes 16, 32, ..."
            )

    @staticmethod
    def stored_scales(scales: Tensor) -> Tensor:
        return as_float16_if_exact(scales)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.nano.linear_int8(
            x, self.packed, self.scales, self.bias, self.group_size, self.num_outputs
        )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        rows: Tensor = torch.ops.nano.dequantize_rows_int8(
            ids, self.packed, self.scales, self.group_size, self.num_outputs, self.num_inputs
        )
        return rows


class W8A8Weight(Int8Weight):
    """Weights with one scale for each output times activations of 8 bits with one for each row.

    scales: [P, 1, 64] float32. A row with NaN or infinity in it gives NaN.
    """

    format = "w8a8"
    kernels = ("int8", "w8a8")

    @classmethod
    def check(cls, record: Symmetric8) -> None:
        if record.scale.shape[1] != 1:
            raise ValueError(
                f"{record.scale.shape[1]} scales for an output; {cls.format} takes one"
            )
        # Sums stay below 2^31.
        if record.q.shape[1] > 2**17:
            raise ValueError(f"{record.q.shape[1]} inputs; {cls.format} takes 131072")

    @staticmethod
    def stored_scales(scales: Tensor) -> Tensor:
        return scales.float()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.nano.linear_w8a8(
            x, self.packed, self.scales, self.bias, self.num_outputs
        )
        return out
