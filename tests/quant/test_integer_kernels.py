"""w8a8 and w4a8: integers, exactly, and each row with scales of its own."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nano.quant.int4_weight import W4A8Weight
from nano.quant.int8_weight import W8A8Weight
from tests.quant.matrices import NUM_ROWS, SHAPES, affine4, biases, inputs, symmetric8

pytestmark = pytest.mark.skipif(
    not (W8A8Weight.is_available() and W4A8Weight.is_available()), reason="needs a C++ compiler"
)

FORMATS = ["w8a8", "w4a8"]


def make(format, shape, *, has_bias=True):
    bias = biases(shape[0]) if has_bias else None
    if format == "w8a8":
        return W8A8Weight.pack(symmetric8(shape, shape[1], is_float16=False), bias)
    return W4A8Weight.pack(affine4(shape, 32), bias)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> int64 [M, K] and scales [M, 1]: one for each row."""
    largest = x.abs().amax(1, keepdim=True)
    inverse = torch.where(largest == 0, 0, 127 / largest)
    return (x * inverse).round().long(), largest / 127


def grouped(x: Tensor, group_size: int) -> Tensor:
    """x [M, K] -> [M, groups, group_size], with zeros behind the last."""
    return functional.pad(x, (0, -x.shape[1] % group_size)).unflatten(1, (-1, group_size))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_w8a8_equals_integer_arithmetic_bit_by_bit(shape, has_bias):
    record = symmetric8(shape, shape[1], is_float16=False)
    weight = W8A8Weight.pack(record, biases(shape[0]) if has_bias else None)
    x = inputs(shape[1])
    x[5] = 0.0
    x[6] *= 1e-30
    q, scale = quantized(x)
    exact = (q @ record.q.long().T).float() * scale * record.scale.T
    if weight.bias is not None:
        exact = exact + weight.bias
    for num_rows in NUM_ROWS:
        assert torch.equal(weight(x[:num_rows]), exact[:num_rows])


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("group_size", [32, 96, "row"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_w4a8_equals_float64_on_the_quantised_inputs(shape, group_size, has_bias):
    record = affine4(shape, shape[1] if group_size == "row" else group_size)
    weight = W4A8Weight.pack(record, biases(shape[0]) if has_bias else None)
    x = inputs(shape[1])
    x[5, :32] = 0.0
    q, scale = quantized(grouped(x, 32).flatten(0, 1))
    rounded = (q * scale.double()).view(len(x), -1)[:, : shape[1]]
    bias = None if weight.bias is None else weight.bias.double()
    exact = functional.linear(rounded, record.dequantized().double(), bias)
    for num_rows in NUM_ROWS:
        error = (weight(x[:num_rows]) - exact[:num_rows]).abs().max()
        assert error <= 2e-6 * shape[1] ** 0.5 * exact.abs().max()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(
    shape, format, set_num_threads
):
    weight = make(format, shape)
    sizes = torch.logspace(-3, 3, max(NUM_ROWS))  # a shared scale would show
    x = inputs(shape[1]) * sizes[:, None]
    whole = weight(x)
    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)
        for num_rows in NUM_ROWS:
            assert torch.equal(weight(x[:num_rows]), whole[:num_rows])
        assert torch.equal(weight(x[33:34]), whole[33:34])


@pytest.mark.parametrize("format", FORMATS)
def test_a_larger_task_than_one_gives_the_same_rows(format):
    weight = make(format, (130, 576))
    x = torch.randn(300, 576)  # rows that are cut among tasks, too
    whole = weight(x)
    assert torch.equal(weight(x[250:]), whole[250:])
    assert torch.equal(weight(x[:129]), whole[:129])


@pytest.mark.parametrize("format", FORMATS)
def test_the_inputs_lose_little_and_an_outlier_harms_its_scale_only(format):
    weight = make(format, (64, 576), has_bias=False)
    exact_weight = weight.dequantized()
    x = inputs(576)

    def relative_error(x: Tensor) -> float:
        exact = x @ exact_weight.T
        return ((weight(x) - exact).norm() / exact.norm()).item()

    assert 0 < relative_error(x) < 0.015
    x[:, 100] *= 100
    spoilt = weight(x) - x[:, 100:101] * exact_weight[:, 100]
    rest = x.clone()
    rest[:, 100] = 0
    error = (spoilt - rest @ exact_weight.T).norm() / (rest @ exact_weight.T).norm()
    # One row scale: all its inputs share what the outlier leaves. Groups: 31 of 575 do.
    assert (0.1 < error < 1.0) if format == "w8a8" else (error < 0.15)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_nan_and_harms_no_other(format, value):
    weight = make(format, (40, 100))
    x = inputs(100)
    clean = weight(x)
    x[3, 99] = value
    spoilt = weight(x)
    others = [i for i in range(len(x)) if i != 3]
    assert spoilt[3].isnan().all()
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("format", FORMATS)
def test_extreme_rows_stay_finite(format):
    weight = make(format, (64, 64), has_bias=False)
    x = torch.ones(4, 64) * torch.tensor([0.0, 1e-45, 1e-38, 1e34])[:, None]
    out = weight(x * torch.randn(64).sign())
    # Too small for an inverse: counted as zero.
    assert torch.equal(out[:2], torch.zeros(2, 64))
    assert torch.equal(out[2], torch.zeros(64))
    assert out[3].isfinite().all()
    assert out[3].abs().max() > 1e34


def test_no_sum_of_quants_overflows():
    # 255 * 127 * 4 saturates where pairs are summed in 16 bits; -128 has no magnitude in 8 bits.
    record = symmetric8((64, 4096), 4096)
    record.q.fill_(-128)
    x = torch.ones(1, 4096)
    out = W8A8Weight.pack(record, None)(x)
    exact = torch.tensor(-128.0 * 127 * 4096) * (1 / torch.tensor(127.0)) * record.scale.T
    assert torch.equal(out, exact)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_lie_apart_are_read_right(format, num_rows):
    weight = make(format, (48, 96))
    x = inputs(96)[:num_rows]
    apart = torch.randn(70, 200)[:, 50:146].copy_(inputs(96)[:70])[:num_rows]
    assert torch.equal(weight(apart), weight(x))


def test_records_that_a_format_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="3 scales for an output"):
        W8A8Weight.pack(symmetric8((40, 96), 32), None)
    with pytest.raises(ValueError, match="groups of 48 inputs"):
        W4A8Weight.pack(affine4((40, 96), 48), None)
