"""QuantizedWeight: what the packed formats of this folder share.

M rows, K inputs, N outputs, P panels of 64 outputs (the last one padded), G groups of inputs that
share a scale. A word is four bytes, of one output: as many inputs as fit.
"""

from abc import abstractmethod
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano.layers.packed_weight import PANEL, PackedWeight
from nano.native.build import build_all, load_ops


class QuantizedWeight(PackedWeight):
    """Words and scales of a matrix, and rows of it as floats: for embeddings that share it."""

    kernels: ClassVar[tuple[str, ...]]  # the files <kernel>_linear.cpp that hold its ops
    inputs_per_word: ClassVar[int]
    packed: Tensor  # [P, K / inputs_per_word, 64, 4]
    scales: Tensor  # float16 or float32
    bias: Tensor | None  # [N] float32
    input_order: Tensor | None  # [K] int64: column k multiplies x[input_order[k]]

    def __init__(
        self,
        packed: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
        group_size: int,
        input_order: Tensor | None = None,
    ):
        super().__init__()
        if not self.is_available():
            raise RuntimeError(f"the kernels of format {self.format} need a C++ compiler")
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("input_order", input_order, persistent=False)
        self.num_outputs, self.num_inputs = shape
        self.group_size = group_size

    @classmethod
    def is_available(cls) -> bool:
        """Whether the kernels are: they need a C++ compiler, or a cache filled by one."""
        return _load(cls.kernels)

    @abstractmethod
    def rows(self, ids: Tensor) -> Tensor:
        """ids: [T] int32 or int64 -> [T, K] float32, the same bits as `dequantized()[ids]`."""

    def dequantized(self) -> Tensor:
        return self.rows(torch.arange(self.num_outputs))

    def as_table(self) -> "QuantizedTable":
        """For an embedding; it holds no copy."""
        return QuantizedTable(self)

    def _ordered(self, x: Tensor) -> Tensor:
        """The columns of x in the order of the weight's."""
        return x if self.input_order is None else x.index_select(1, self.input_order)

    def _reordered(self, rows: Tensor) -> Tensor:
        """The columns of the weight in the order of x's."""
        if self.input_order is None:
            return rows
        return torch.empty_like(rows).index_copy_(1, self.input_order, rows)


class QuantizedTable(nn.Module):
    """ids [T] -> the rows [T, K] of a packed matrix, which may serve a linear layer at once."""

    def __init__(self, weight: QuantizedWeight):
        super().__init__()
        self.weight = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.weight.rows(token_ids.long())  # a step has them as int32


def to_panels(matrix: Tensor, multiple: int = 1) -> Tensor:
    """[N, K] -> [P, 64, K], with zeros up to whole panels and a multiple of inputs."""
    num_outputs, num_inputs = matrix.shape
    padded = functional.pad(matrix, (0, -num_inputs % multiple, 0, -num_outputs % PANEL))
    return padded.view(-1, PANEL, padded.shape[1])


def as_float16_if_exact(scales: Tensor) -> Tensor:
    half = scales.half()
    is_exact = torch.equal(half.float(), scales) and bool(half.isfinite().all())
    return half if is_exact else scales.float()


def sources(kernels: tuple[str, ...]) -> list[Path]:
    return [Path(__file__).with_name(f"{name}_linear.cpp") for name in kernels]


@cache
def _load(kernels: tuple[str, ...]) -> bool:
    build_all(sources(kernels))  # side by side
    return all(_register(name) for name in kernels)


@cache
def _register(kernel: str) -> bool:
    """Register the ops of one file, and how to trace them."""
    (source,) = sources((kernel,))
    if not load_ops(source):
        return False
    torch.library.register_fake(f"nano::linear_{kernel}", _fake_linear)
    if kernel in ("int4", "int8"):
        torch.library.register_fake(f"nano::dequantize_rows_{kernel}", _fake_rows)
    return True


def _fake_linear(x: Tensor, *others: Any) -> Tensor:
    num_outputs = others[-1]
    return x.new_empty(x.shape[0], num_outputs)


def _fake_rows(ids: Tensor, *others: Any) -> Tensor:
    num_inputs = others[-1]
    return ids.new_empty(ids.shape[0], num_inputs, dtype=torch.float32)
