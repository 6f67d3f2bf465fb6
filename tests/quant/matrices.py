"""Quantised matrices of every awkward shape, and inputs for them."""

import torch
from torch import Tensor

from nano.quant.records import Affine4, Symmetric8

# Outputs that fill no panel, one, and several and a bit; odd inputs; a last group that is short.
SHAPES = [(64, 32), (40, 100), (7, 33), (1, 1), (130, 576), (321, 67)]
# On either side of every change of method: one row, few, many, uneven tiles, several blocks.
NUM_ROWS = [*range(1, 18), 25, 70, 225, 229, 460]


def affine4(
    shape: tuple[int, int], group_size: int, *, is_float16: bool = True, has_order: bool = False
) -> Affine4:
    generator = torch.Generator().manual_seed(shape[0])
    groups = shape[0], -(-shape[1] // group_size)
    scale = torch.rand(groups, generator=generator) * 0.1
    offset = torch.randn(groups, generator=generator)
    if is_float16:
        scale, offset = scale.half().float(), offset.half().float()
    q = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    order = torch.randperm(shape[1], generator=generator) if has_order else None
    return Affine4(q, scale, offset, group_size, order)


def symmetric8(shape: tuple[int, int], group_size: int, *, is_float16: bool = True) -> Symmetric8:
    generator = torch.Generator().manual_seed(shape[0])
    scale = torch.rand(shape[0], -(-shape[1] // group_size), generator=generator) * 0.1
    if is_float16:
        scale = scale.half().float()
    q = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    return Symmetric8(q, scale, group_size)


def inputs(num_inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_inputs)
    return torch.randn(max(NUM_ROWS), num_inputs, generator=generator)


def biases(num_outputs: int) -> Tensor:
    return torch.randn(num_outputs, generator=torch.Generator().manual_seed(num_outputs))
