"""GGUF blocks as records, against what the gguf package makes of the same bytes."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from nano.checkpoint.gguf_file import GGUF_TYPES
from nano.checkpoint.quantization_config import GGUF_PACKED_TYPES
from nano.quant.gguf import gguf_record, gguf_shape
from nano.quant.records import Affine4
from tests.checkpoint.gguf_files import quantize, rounded

# The upper byte of every float16 in a block.
FLOAT16_BYTES = {"Q4_K": (1, 3), "Q6_K": (209,), "Q4_1": (1, 3)}


def random_blocks(type_name: str, num_rows: int = 48, num_blocks: int = 3) -> np.ndarray:
    """Every bit pattern there is, but for infinite and NaN scales."""
    num_bytes = GGUF_TYPES[type_name].num_bytes
    rng = np.random.default_rng(len(type_name))
    blocks = rng.integers(0, 256, (num_rows, num_blocks, num_bytes), dtype=np.uint8)
    for place in FLOAT16_BYTES.get(type_name, (1,)):
        exponent = blocks[:, :, place] >> 2 & 31
        blocks[:, :, place] ^= np.where(exponent == 31, 0x40, 0).astype(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("type_name", GGUF_PACKED_TYPES)
def test_any_block_means_the_same_weights_bit_by_bit(type_name):
    blocks = random_blocks(type_name)
    expected = gguf.quants.dequantize(blocks, GGMLQuantizationType[type_name])
    assert np.isfinite(expected).all()
    assert len(np.unique(expected)) > 1000
    weight = gguf_record(torch.from_numpy(blocks), type_name).dequantized()
    assert weight.dtype == torch.float32
    assert torch.equal(weight, torch.from_numpy(expected))


@pytest.mark.parametrize("type_name", GGUF_PACKED_TYPES)
def test_float_rows_come_back_as_near_as_the_type_allows(type_name):
    """This one knows what the numbers should be, where random blocks only compare two readers."""
    weight = np.random.default_rng(1).standard_normal((8, 512)).astype(np.float32)
    kind = GGMLQuantizationType[type_name]
    record = gguf_record(torch.from_numpy(quantize(weight, kind)), type_name)
    error = np.abs(record.dequantized().numpy() - weight).max()
    assert error <= {4: 0.5, 5: 0.2, 6: 0.12, 8: 0.02}[int(type_name[1])]
    assert np.array_equal(record.dequantized().numpy(), rounded(weight, kind))


@pytest.mark.parametrize("type_name", GGUF_PACKED_TYPES)
def test_records_keep_their_contract(type_name):
    blocks = torch.from_numpy(random_blocks(type_name))
    record = gguf_record(blocks, type_name)
    num_outputs, num_inputs = gguf_shape(blocks.shape, type_name)
    num_groups = num_inputs // record.group_size
    assert record.q.shape == (num_outputs, num_inputs)
    assert record.q.is_contiguous()
    assert record.scale.shape == (num_outputs, num_groups)
    assert record.scale.dtype == torch.float32
    if isinstance(record, Affine4):
        assert record.q.dtype == torch.uint8
        assert (int(record.q.min()), int(record.q.max())) == (0, 15)
        assert record.offset.shape == (num_outputs, num_groups)
        assert record.offset.dtype == torch.float32
    else:
        assert record.q.dtype == torch.int8


@pytest.mark.parametrize("type_name", GGUF_PACKED_TYPES)
def test_our_sizes_are_those_of_the_gguf_package(type_name):
    kind = GGUF_TYPES[type_name]
    package_type = GGMLQuantizationType[type_name]
    assert kind.type_id == package_type
    assert (kind.num_weights, kind.num_bytes) == gguf.GGML_QUANT_SIZES[package_type]
