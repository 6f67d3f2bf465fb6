"""AutoAWQ's gemm layout as a record. N outputs, K inputs, G of which share scale and zero point."""

import torch
from torch import Tensor

from nano.quant.int4_words import PER_WORD, check_tensor, nibbles, zero_point_record
from nano.quant.records import Affine4

AWQ_PARTS = ("qweight", "qzeros", "scales")

# Where in a word output i of eight is: output 1 is the fifth number, output 2 the second ...
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def awq_record(parts: dict[str, Tensor], shape: tuple[int, int], group_size: int | None) -> Affine4:
    """parts: qweight [K, N / 8] int32, qzeros [K / G, N / 8] int32, scales [K / G, N] float."""
    num_outputs, num_inputs = shape
    size = group_size or num_inputs
    num_groups, num_words = -(-num_inputs // size), num_outputs // PER_WORD
    check_tensor("qweight", parts["qweight"], (num_inputs, num_words), torch.int32)
    check_tensor("qzeros", parts["qzeros"], (num_groups, num_words), torch.int32)
    check_tensor("scales", parts["scales"], (num_groups, num_outputs))
    q = nibbles(parts["qweight"])[..., _PLACES].flatten(1).T.contiguous()
    zeros = nibbles(parts["qzeros"])[..., _PLACES].flatten(1)
    return zero_point_record(q, zeros, parts["scales"], size)
