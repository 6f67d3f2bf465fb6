"""4-bit numbers in int32 words, eight to a word, as AWQ and GPTQ store them."""

import torch
from torch import Tensor

from nano.errors import CheckpointError
from nano.quant.records import Affine4

PER_WORD = 8


def nibbles(words: Tensor) -> Tensor:
    """[..., W] int32 -> [..., W, 8] uint8, the lowest four bits first."""
    pairs = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)


def zero_point_record(
    q: Tensor,
    zeros: Tensor,
    scales: Tensor,
    group_size: int,
    input_order: Tensor | None = None,
) -> Affine4:
    """weight = (q - zero) * scale, exactly: with a float16 or bfloat16 scale no product is rounded.

    q: [N, K] uint8; zeros: [groups, N] uint8; scales: [groups, N] of any float.
    """
    scale = scales.float().T.contiguous()
    return Affine4(q, scale, -(zeros.T * scale), group_size, input_order)


def check_tensor(
    part: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if tensor.shape != shape:
        raise CheckpointError(f"{part} has shape {tuple(tensor.shape)}, expected {shape}")
    if dtype is not None and tensor.dtype != dtype:
        raise CheckpointError(f"{part} is {tensor.dtype}, expected {dtype}")
