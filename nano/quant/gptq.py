"""GPTQ's layout as a record. N outputs, K inputs, G of which share a scale and a zero point."""

import torch
from torch import Tensor

from nano.checkpoint.quantization_config import GptqConfig
from nano.errors import CheckpointError
from nano.quant.int4_words import PER_WORD, check_tensor, nibbles, zero_point_record
from nano.quant.records import Affine4

GPTQ_PARTS = ("qweight", "qzeros", "scales")
GPTQ_OPTIONAL_PARTS = ("g_idx",)

_ONES = 0x11111111  # a one in each of a word's eight numbers


def gptq_record(parts: dict[str, Tensor], shape: tuple[int, int], config: GptqConfig) -> Affine4:
    """parts: qweight [K / 8, N] int32, qzeros [K / G, N / 8] int32, scales [K / G, N] float, and
    maybe g_idx [K] int32, the group of each input.
    """
    num_outputs, num_inputs = shape
    size = config.group_size or num_inputs
    num_groups = -(-num_inputs // size)
    check_tensor("qweight", parts["qweight"], (num_inputs // PER_WORD, num_outputs), torch.int32)
    check_tensor("qzeros", parts["qzeros"], (num_groups, num_outputs // PER_WORD), torch.int32)
    check_tensor("scales", parts["scales"], (num_groups, num_outputs))
    q = nibbles(parts["qweight"]).transpose(0, 1).flatten(1)  # [N, K]
    order = _input_order(parts.get("g_idx"), num_inputs, size, config.needs_g_idx)
    if order is not None:
        q = q[:, order]
    return zero_point_record(q, _zeros(parts["qzeros"], config), parts["scales"], size, order)


def _zeros(words: Tensor, config: GptqConfig) -> Tensor:
    """[K / G, N / 8] int32 -> [K / G, N] uint8."""
    if config.zeros == "borrowed":
        words = words + _ONES  # carries what was borrowed
    zeros = nibbles(words).flatten(1)
    if config.zeros == "less_one":
        zeros = (zeros + 1) & 15
    return zeros


def _input_order(
    g_idx: Tensor | None, num_inputs: int, group_size: int, needs_g_idx: bool
) -> Tensor | None:
    """The inputs sorted by group; None if they are in that order already.

    Within a group they keep their order, so that equal tables give equal orders.
    """
    if g_idx is None:
        if needs_g_idx:
            raise CheckpointError("g_idx is absent, which desc_act true implies")
        return None
    check_tensor("g_idx", g_idx, (num_inputs,))
    groups, order = torch.sort(g_idx.long(), stable=True)
    if not torch.equal(groups, torch.arange(num_inputs) // group_size):
        raise CheckpointError(f"g_idx does not part {num_inputs} inputs in groups of {group_size}")
    return None if torch.equal(order, torch.arange(num_inputs)) else order
