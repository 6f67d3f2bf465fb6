"""Quantised matrices as plain records: what checkpoints hold and schemes make, before packing.

N outputs, K inputs, groups of G inputs that share a scale: column k belongs to group k // G.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Affine4:
    """weight[n, k] = q * scale + offset in float32, rounded once. q in 0 .. 15.

    With `input_order` (act-order) column k multiplies x[input_order[k]]; without, x[k].
    """

    q: Tensor  # [N, K] uint8
    scale: Tensor  # [N, K / G] float32
    offset: Tensor  # [N, K / G] float32
    group_size: int  # a multiple of 16; the last group may be short
    input_order: Tensor | None = None  # [K] int64

    def dequantized(self) -> Tensor:
        """[N, K] float32, columns in the order of x."""
        # In float64 nothing is rounded before the end, unless scale and offset are 2^25 apart.
        scale = _widen(self.scale.double(), self.q, self.group_size)
        offset = _widen(self.offset.double(), self.q, self.group_size)
        weight = (self.q * scale + offset).float()
        if self.input_order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.input_order, weight)

    def joined(self, below: "Affine4") -> "Affine4 | None":
        """One record of both's outputs; None if they differ in groups or in the order of inputs."""
        if self.group_size != below.group_size:
            return None
        if not _is_same_order(self.input_order, below.input_order):
            return None
        return Affine4(
            torch.cat([self.q, below.q]),
            torch.cat([self.scale, below.scale]),
            torch.cat([self.offset, below.offset]),
            self.group_size,
            self.input_order,
        )


@dataclass(frozen=True, slots=True)
class Symmetric8:
    """weight[n, k] = q * scale. q in -128 .. 127."""

    q: Tensor  # [N, K] int8
    scale: Tensor  # [N, K / G] float32; one column if the whole row shares it
    group_size: int  # a multiple of 16, or K

    def dequantized(self) -> Tensor:
        """[N, K] float32."""
        return self.q * _widen(self.scale, self.q, self.group_size)

    def joined(self, below: "Symmetric8") -> "Symmetric8 | None":
        """One record of both's outputs; None if they differ in groups."""
        if self.group_size != below.group_size:
            return None
        return Symmetric8(
            torch.cat([self.q, below.q]), torch.cat([self.scale, below.scale]), self.group_size
        )


Record = Affine4 | Symmetric8


def _widen(per_group: Tensor, q: Tensor, group_size: int) -> Tensor:
    """[N, K / G] -> [N, K]."""
    if per_group.shape[1] == 1:
        return per_group
    return per_group.repeat_interleave(group_size, dim=1)[:, : q.shape[1]]


def _is_same_order(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
