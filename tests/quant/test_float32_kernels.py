"""int4 and int8 in float32 arithmetic: the bits of the dequantised matrix, in every company."""

import pytest
import torch
from torch.nn import functional

from nano.layers.cpu_linear import FloatWeight
from nano.quant.int4_weight import Int4Weight
from nano.quant.int8_weight import Int8Weight
from tests.quant.matrices import NUM_ROWS, SHAPES, affine4, biases, inputs, symmetric8

pytestmark = pytest.mark.skipif(
    not (FloatWeight.is_available() and Int4Weight.is_available()), reason="needs a C++ compiler"
)

FORMATS = ["int4", "int8"]
GROUP_SIZES = [16, 32, 48, 128, "row"]


def make(format, shape, group_size=32, *, is_float16=True, has_bias=True):
    """A record of this format and its packed weight."""
    group_size = shape[1] if group_size == "row" else group_size
    bias = biases(shape[0]) if has_bias else None
    if format == "int4":
        record = affine4(shape, group_size, is_float16=is_float16)
        return record, Int4Weight.pack(record, bias)
    record = symmetric8(shape, group_size, is_float16=is_float16)
    return record, Int8Weight.pack(record, bias)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_float64_up_to_rounding(shape, has_bias, format):
    record, weight = make(format, shape, has_bias=has_bias)
    x = inputs(shape[1])
    bias = None if weight.bias is None else weight.bias.double()
    exact = functional.linear(x.double(), record.dequantized().double(), bias)
    for num_rows in NUM_ROWS:
        out = weight(x[:num_rows])
        assert out.shape == (num_rows, shape[0])
        error = (out - exact[:num_rows]).abs().max()
        assert error <= 2e-6 * shape[1] ** 0.5 * exact.abs().max()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_float16", [True, False])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_has_the_bits_of_the_dequantised_matrix(shape, group_size, is_float16, format):
    record, weight = make(format, shape, group_size, is_float16=is_float16)
    assert weight.scales.dtype == (torch.float16 if is_float16 else torch.float32)
    assert torch.equal(weight.dequantized(), record.dequantized())
    floats = FloatWeight.pack(record.dequantized(), weight.bias, "float32")
    x = inputs(shape[1])
    for num_rows in NUM_ROWS:
        assert torch.equal(weight(x[:num_rows]), floats(x[:num_rows]))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(
    shape, format, set_num_threads
):
    _, weight = make(format, shape)
    x = inputs(shape[1])
    whole = weight(x)
    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)
        for num_rows in NUM_ROWS:
            assert torch.equal(weight(x[:num_rows]), whole[:num_rows])
        assert torch.equal(weight(x[33:34]), whole[33:34])


@pytest.mark.parametrize("format", FORMATS)
def test_every_quant_is_decoded_to_its_own_value(format):
    num_quants = 16 if format == "int4" else 256
    record, weight = make(format, (num_quants, 67))
    values = torch.arange(num_quants) - (0 if format == "int4" else 128)
    record.q.copy_(values[:, None])  # a quant at every place of a word
    weight = type(weight).pack(record, None)
    assert torch.equal(weight.dequantized(), record.dequantized())
    ones = torch.eye(67)
    assert torch.equal(weight(ones), record.dequantized().T)


@pytest.mark.parametrize("format", FORMATS)
def test_scales_that_float16_cannot_hold_stay_float32(format):
    record, _ = make(format, (40, 100))
    record.scale[39, 3] = 1.0 + 2**-20
    weight = (Int4Weight if format == "int4" else Int8Weight).pack(record, None)
    assert weight.scales.dtype == torch.float32
    assert torch.equal(weight.dequantized(), record.dequantized())


@pytest.mark.parametrize("scale", [2.0**-24, 6.0e-8, 65504.0, 0.0, -0.25])
def test_float16_scales_are_exact_to_the_ends_of_their_range(scale):
    record, _ = make("int8", (64, 64))
    record.scale.fill_(scale).copy_(record.scale.half().float())
    weight = Int8Weight.pack(record, None)
    assert weight.scales.dtype == torch.float16
    assert torch.equal(weight.dequantized(), record.dequantized())


def test_act_order_multiplies_each_column_by_its_own_input():
    record = affine4((40, 96), 32, has_order=True)
    weight = Int4Weight.pack(record, biases(40))
    assert torch.equal(weight.dequantized(), record.dequantized())
    # One chain over the stored order of the columns.
    order = record.input_order
    floats = FloatWeight.pack(record.dequantized()[:, order], weight.bias, "float32")
    x = inputs(96)
    for num_rows in NUM_ROWS:
        assert torch.equal(weight(x[:num_rows]), floats(x[:num_rows, order]))
    ids = torch.tensor([3, 39])
    assert torch.equal(weight.rows(ids), record.dequantized()[ids])


@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_infinity_stay_in_their_row(format):
    _, weight = make(format, (40, 100))
    x = inputs(100)
    clean = weight(x)
    x[3, 5], x[7, 0] = float("nan"), float("inf")
    spoilt = weight(x)
    others = [i for i in range(len(x)) if i not in (3, 7)]
    assert spoilt[3].isnan().all()
    assert not spoilt[7].isfinite().any()
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_lie_apart_are_read_right(format, num_rows):
    _, weight = make(format, (48, 96))
    x = inputs(96)[:num_rows]
    apart = torch.randn(70, 200)[:, 50:146].copy_(inputs(96)[:70])[:num_rows]
    assert torch.equal(weight(apart), weight(x))


@pytest.mark.parametrize("format", FORMATS)
def test_groups_that_cut_a_word_are_refused(format):
    with pytest.raises(ValueError, match="groups of 20 inputs"):
        make(format, (40, 100), 20)
