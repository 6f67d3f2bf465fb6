"""GGUF's quantised blocks as records: the same weights as llama.cpp's, bit for bit.

A row is a sequence of blocks, each with its scales before or behind its quants. Every weight is a
float16 scale times small integers, and perhaps less a second such product. Those products have at
most 11 + 8 + 5 = 24 significant bits, so float32 holds them exactly and one rounding at most
remains, the one that a record's formula has too.

N outputs, K inputs, B blocks in a row of K inputs, S scales in a block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nano.checkpoint.gguf_file import GGUF_TYPES
from nano.quant.records import Affine4, Symmetric8

_LOW_BITS = 0x0F0F0F0F0F0F0F0F


def gguf_record(blocks: Tensor, type_name: str) -> Affine4 | Symmetric8:
    """blocks: [N, bytes of a row] uint8, as in the file."""
    decode = _DECODERS[type_name]
    return decode(blocks.unflatten(1, (-1, GGUF_TYPES[type_name].num_bytes)))


def gguf_shape(shape: torch.Size, type_name: str) -> tuple[int, int]:
    """[N, bytes of a row] -> (N, K)."""
    kind = GGUF_TYPES[type_name]
    return shape[0], shape[1] // kind.num_bytes * kind.num_weights


# blocks: [N, B, bytes] uint8 for all that follow. What the bytes are, in order, is in the names.


def _q4_0(blocks: Tensor) -> Affine4:
    scale, quants = _float16(blocks[..., :2]), blocks[..., 2:]
    return _affine4(_low_then_high(quants), scale, -8.0 * scale)


def _q4_1(blocks: Tensor) -> Affine4:
    scale, offset, quants = _float16(blocks[..., :2]), _float16(blocks[..., 2:4]), blocks[..., 4:]
    return _affine4(_low_then_high(quants), scale, offset)


def _q4_k(blocks: Tensor) -> Affine4:
    """Eight groups of 32: two float16 that scale eight 6-bit scales and eight 6-bit minima."""
    scale, minimum = _float16(blocks[..., :2]), _float16(blocks[..., 2:4])
    # The low six bits of bytes 0 - 3 and 4 - 7 are scales and minima 0 - 3. Those of 4 - 7 have
    # their low four bits in bytes 8 - 11 and their high two on top of the first eight bytes.
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | (first >> 2) & 48], dim=-1)  # [N, B, 8]
    minima = torch.cat([second & 63, third >> 4 | (second >> 2) & 48], dim=-1)
    quants = blocks[..., 16:].unflatten(-1, (4, 32))
    return _affine4(_low_then_high(quants), scale * scales, -(minimum * minima))


def _q5_0(blocks: Tensor) -> Symmetric8:
    """Bit i of the four bytes behind the scale is the fifth bit of weight i."""
    scale, fifth, quants = _float16(blocks[..., :2]), blocks[..., 2:6], blocks[..., 6:]
    q = _low_then_high(quants) | _bits(fifth) << 4
    return _symmetric8(q.view(torch.int8) - 16, scale, 32)


def _q6_k(blocks: Tensor) -> Symmetric8:
    """16 groups of 16: low four bits, high two bits, signed 8-bit scales, what scales them."""
    low, high, scales, scale = blocks.split([128, 64, 16, 2], dim=-1)
    low = _low_then_high(low.unflatten(-1, (2, 64))).unflatten(-1, (4, 32))  # [N, B, 2, 4, 32]
    high = high.contiguous().unflatten(-1, (2, 32))
    high = torch.stack([high << 4 & 48, high << 2 & 48, high & 48, high >> 2 & 48], dim=-2)
    q = (low | high).view(torch.int8) - 32
    return _symmetric8(q, _float16(scale) * scales.view(torch.int8), 16)


def _q8_0(blocks: Tensor) -> Symmetric8:
    scale, quants = _float16(blocks[..., :2]), blocks[..., 2:]
    return _symmetric8(quants.contiguous().view(torch.int8), scale, 32)


_DECODERS: dict[str, Callable[[Tensor], Affine4 | Symmetric8]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def _affine4(q: Tensor, scale: Tensor, offset: Tensor) -> Affine4:
    """q: [N, ...], one row's weights in order; scale, offset: [N, B, S], groups of 32."""
    return Affine4(q.flatten(1), scale.flatten(1), offset.flatten(1), 32)


def _symmetric8(q: Tensor, scale: Tensor, group_size: int) -> Symmetric8:
    return Symmetric8(q.flatten(1), scale.flatten(1), group_size)


def _low_then_high(quants: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: the low four bits of all n, then the high four bits.

    Eight bytes at a time: one by one, a row of 16 is mostly overhead.
    """
    words = quants.contiguous().view(torch.int64)
    return torch.cat([words & _LOW_BITS, words >> 4 & _LOW_BITS], dim=-1).view(torch.uint8)


def _bits(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 8 n], one byte of 0 or 1 for each bit, lowest first."""
    bytes_of = torch.arange(256, dtype=torch.uint8)[:, None] >> torch.arange(8) & 1  # [256, 8]
    words = bytes_of.to(torch.uint8).view(torch.int64).flatten()
    return words[packed.int()].view(torch.uint8)


def _float16(pairs: Tensor) -> Tensor:
    """[N, B, 2] bytes -> [N, B, 1] float32."""
    return pairs.contiguous().view(torch.float16).float()
