"""4-bit weights in groups, multiplied by float32 activations, exactly, or by 8-bit ones, fast.

N outputs, K inputs, P panels of 64 outputs, G groups.
"""

from typing import ClassVar, Self

import torch
from torch import Tensor

from nano.quant.quantized_weight import QuantizedWeight, as_float16_if_exact, to_panels
from nano.quant.records import Affine4


class Int4Weight(QuantizedWeight):
    """An `Affine4` record, with float32 arithmetic: the bits of the dequantised matrix.

    packed: [P, ceil(K / 8), 64, 4] uint8, a byte holding inputs i and i + 4 of a word's eight.
    scales: [P, G, 2, 64]: scales, then offsets.
    """

    format = "int4"
    kernels: ClassVar[tuple[str, ...]] = ("int4",)
    inputs_per_word = 8
    group_multiple: ClassVar[int] = 16  # of the inputs that share a scale, unless all do

    @classmethod
    def pack(cls, record: Affine4, bias: Tensor | None) -> Self:
        """bias: [N] float32."""
        cls.check(record)
        halves = to_panels(record.q, cls.inputs_per_word).unflatten(2, (-1, 2, 4))
        low, high = halves.unbind(3)  # [P, 64, K / 8, 4]
        scale, offset = (to_panels(part) for part in (record.scale, record.offset))  # [P, 64, G]
        return cls(
            (low | high << 4).transpose(1, 2).contiguous(),
            as_float16_if_exact(torch.stack((scale, offset)).permute(1, 3, 0, 2).contiguous()),
            bias,
            (record.q.shape[0], record.q.shape[1]),
            record.group_size,
            record.input_order,
        )

    @classmethod
    def check(cls, record: Affine4) -> None:
        multiple, num_inputs = cls.group_multiple, record.q.shape[1]
        if record.group_size % multiple and record.group_size < num_inputs:
            raise ValueError(
                f"groups of {record.group_size} inputs; {cls.format} takes {multiple}, "
                f"{2 * multiple}, ..."
            )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(torch.ops.nano, f"linear_{self.format}")(
            self._ordered(x),
            self.packed,
            self.scales,
            self.bias,
            self.group_size,
            self.num_outputs,
        )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        rows: Tensor = torch.ops.nano.dequantize_rows_int4(
            ids, self.packed, self.scales, self.group_size, self.num_outputs, self.num_inputs
        )
        return self._reordered(rows)


class W4A8Weight(Int4Weight):
    """The same weights times activations of 8 bits, with one scale for 32 neighbours of a row.

    Several times as fast with many rows. What it costs is the rounding of the activations: see
    docs/log.md.
    """

    format = "w4a8"
    kernels = ("int4", "w4a8")
    group_multiple = 32
