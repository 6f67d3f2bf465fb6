"""Quantised matrices as plain records: what checkpoints hold and schemes make, before packing.

N outputs, K inputs, groups of G inputs that share a scale: column k belongs to group k // G.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Affine4:
    """weight[n, k] = q * scale + offset in float32, rounded once. q in 0 .. 15."""

    q: Tensor  # [N, K] uint8
    scale: Tensor  # [N, K / G] float32
    offset: Tensor  # [N, K / G] float32
    group_size: int  # a multiple of 16; the last group may be short
    input_order: Tensor | None = None  # [K] int64: column k multiplies x[input_order[k]] (act-order)


@dataclass(frozen=True, slots=True)
class Symmetric8:
    """weight[n, k] = q * scale. q in -128 .. 127."""

    q: Tensor  # [N, K] int8
    scale: Tensor  # [N, K / G] float32; one column if the whole row shares it
    group_size: int  # a multiple of 16, or K
