"""The kernels built for older CPUs: integers give the same bits everywhere, chains wherever
multiply-adds are fused."""

import pytest
import torch
from torch import Tensor

from nano.quant.formats import pack
from nano.quant.int4_weight import W4A8Weight
from nano.quant.int8_weight import W8A8Weight
from tests.other_cpus import AVX2, FLAGS, computed_with, needs_avx2
from tests.quant.matrices import NUM_ROWS, affine4, biases, inputs, symmetric8

pytestmark = [
    pytest.mark.slow,
    needs_avx2,
    pytest.mark.skipif(
        not (W8A8Weight.is_available() and W4A8Weight.is_available()),
        reason="needs a C++ compiler",
    ),
]

SHAPE = (130, 203)
FORMATS = ["int4", "w4a8", "int8", "w8a8"]


def results(format: str) -> list[Tensor]:
    found = []
    for is_float16 in (True, False):
        if format in ("int4", "w4a8"):
            record = affine4(SHAPE, 32, is_float16=is_float16)
        else:
            group_size = SHAPE[1] if format == "w8a8" else 16
            record = symmetric8(SHAPE, group_size, is_float16=is_float16)
        weight = pack(record, biases(SHAPE[0]), format)
        x = inputs(SHAPE[1])
        found += [weight(x[:num_rows]) for num_rows in NUM_ROWS]
        found.append(weight.dequantized())
    return found


def results_of_all() -> dict[str, list[Tensor]]:
    return {format: results(format) for format in FORMATS}


@pytest.mark.parametrize("flags", FLAGS)
def test_another_instruction_set_gives_the_same_results(flags):
    for format, theirs in computed_with(flags, results_of_all).items():
        for ours, other in zip(results(format), theirs, strict=True):
            torch.testing.assert_close(other, ours, rtol=1e-4, atol=1e-4)
            if format == "w8a8" or flags == AVX2:
                assert torch.equal(other, ours), format
