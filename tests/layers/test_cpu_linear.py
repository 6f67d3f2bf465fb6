"""The packed linear kernel: right up to rounding, and the same bits in every company."""

import pytest
import torch

from nano.layers.cpu_linear import PackedWeight, linear_twin
from nano.layers.linear import Linear

pytestmark = pytest.mark.skipif(not PackedWeight.is_available(), reason="needs a C++ compiler")

SHAPES = [(16, 8), (40, 24), (1, 1), (576, 576), (130, 1100), (1001, 67)]


def make(num_outputs: int, num_inputs: int, stored: str, has_bias: bool = True):
    generator = torch.Generator().manual_seed(num_outputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    if stored == "bfloat16":
        weight = weight.bfloat16().float()
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    x = torch.randn(70, num_inputs, generator=generator)
    return weight, bias, x


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_float64_up_to_rounding(shape, has_bias, stored):
    weight, bias, x = make(*shape, stored, has_bias)
    packed = PackedWeight(weight, bias)
    assert packed.packed.dtype == getattr(torch, stored)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = packed(x)
    assert out.shape == exact.shape
    assert (out - exact).abs().max() <= 2e-6 * shape[1] ** 0.5 * exact.abs().max()
    twin = linear_twin(x, packed.packed, packed.bias)[:, : shape[0]]
    torch.testing.assert_close(out, twin, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(shape, stored):
    weight, bias, x = make(*shape, stored)
    packed = PackedWeight(weight, bias)
    before = torch.get_num_threads()
    whole = packed(x)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num_rows in (*range(1, 16), 64):
            assert torch.equal(packed(x[:num_rows]), whole[:num_rows])
        assert torch.equal(packed(x[33:34]), whole[33:34])
    torch.set_num_threads(before)


def test_storing_as_bfloat16_changes_no_bit():
    weight, bias, x = make(48, 96, "bfloat16")
    small = PackedWeight(weight, bias)
    # One value that bfloat16 cannot hold, in a row of its own, makes the storage float32.
    wider = torch.cat((weight, torch.full((1, 96), 1.0 + 2**-20)))
    large = PackedWeight(wider, torch.cat((bias, bias[:1])))
    assert (small.packed.dtype, large.packed.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(small(x), large(x)[:, :48])


def test_nan_and_infinity_stay_in_their_row():
    weight, bias, x = make(40, 24, "float32")
    packed = PackedWeight(weight, bias)
    clean = packed(x)
    x[3, 5], x[7, 0] = float("nan"), float("inf")
    spoilt = packed(x)
    others = [i for i in range(70) if i not in (3, 7)]
    assert spoilt[3].isnan().all()
    assert not spoilt[7].isfinite().any()
    assert torch.equal(spoilt[others], clean[others])


def test_a_linear_layer_computes_the_same_before_and_after_packing():
    weight, bias, x = make(48, 96, "float32")
    layer = Linear(96, 48, bias=True)
    layer.weight.data.copy_(weight)
    layer.bias.data.copy_(bias)
    before = layer(x)
    layer.pack()
    assert list(layer.parameters()) == []  # the unpacked copy is gone
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)


def test_rows_that_lie_apart_are_read_right():
    weight, bias, x = make(48, 96, "float32")
    packed = PackedWeight(weight, bias)
    apart = torch.randn(70, 200)[:, 50:146].copy_(x)
    assert not apart.is_contiguous()
    assert torch.equal(packed(apart), packed(x))
