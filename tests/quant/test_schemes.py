"""Online quantisation: near the weights, by a known bound, and alike however they are cut."""

import pytest
import torch

from nano.quant import schemes
from nano.quant.records import Affine4, Symmetric8
from nano.quant.schemes import quantize


def relative_error(weight, scheme) -> float:
    return ((quantize(weight, scheme).dequantized() - weight).norm() / weight.norm()).item()


@pytest.fixture
def weight():
    return torch.randn(40, 200, generator=torch.Generator().manual_seed(0)) * 0.05


@pytest.mark.parametrize("scheme", ["int8", "w8a8"])
def test_int8_is_off_by_half_a_step_at_most(scheme, weight):
    record = quantize(weight, scheme)
    assert isinstance(record, Symmetric8)
    assert record.group_size == 200
    assert record.q.abs().amax(1).tolist() == [127] * 40
    error = (record.dequantized() - weight).abs()
    assert (error <= record.scale * 0.5001).all()
    assert relative_error(weight, scheme) < 0.01


@pytest.mark.parametrize("scheme", ["int4", "w4a8"])
def test_int4_is_near_normal_weights_and_its_scales_fit_float16(scheme, weight):
    record = quantize(weight, scheme)
    assert isinstance(record, Affine4)
    assert record.group_size == 32
    assert record.scale.shape == record.offset.shape == (40, 7)  # the last group holds 8
    for scales in (record.scale, record.offset):
        assert torch.equal(scales.half().float(), scales)
    assert int(record.q.max()) == 15
    assert relative_error(weight, scheme) < 0.075


def test_int4_beats_the_plain_range_of_each_group(weight):
    groups = weight[:, :192].reshape(-1, 32)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    plain_error = ((plain - groups).norm() / groups.norm()).item()
    assert relative_error(weight[:, :192], "int4") < 0.95 * plain_error


def test_int4_finds_weights_that_are_on_a_grid_of_sixteen_again():
    # As every group of a checkpoint that was 4-bit before is.
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (40, 64), generator=generator)
    q[:, :2], q[:, 32:34] = torch.tensor([0, 15]), torch.tensor([15, 0])
    weight = q * 0.125 - 1.0
    assert torch.equal(quantize(weight, "int4").dequantized(), weight)


@pytest.mark.parametrize("scheme", schemes.SCHEMES)
def test_an_outlier_column_harms_its_own_group_or_row(scheme, weight):
    clean = quantize(weight, scheme).dequantized()
    weight[:, 40] *= 50
    spoilt = quantize(weight, scheme).dequantized()
    is_harmed = (spoilt != clean).any(0)
    if scheme in ("int4", "w4a8"):
        assert is_harmed.nonzero().flatten().tolist() == list(range(32, 64))
    assert (spoilt[:, 40] - weight[:, 40]).abs().max() < 0.02 * weight[:, 40].abs().max()


@pytest.mark.parametrize("scheme", schemes.SCHEMES)
def test_groups_without_a_range_are_exact(scheme):
    weight = torch.zeros(3, 64)
    assert torch.equal(quantize(weight, scheme).dequantized(), weight)
    weight[1] = 0.25
    weight[2, :32] = -1.5
    dequantized = quantize(weight, scheme).dequantized()
    torch.testing.assert_close(dequantized, weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", schemes.SCHEMES)
def test_the_size_of_a_chunk_changes_nothing(scheme, weight, monkeypatch):
    whole = quantize(weight, scheme)
    monkeypatch.setattr(schemes, "_CHUNK", 7 * 200)
    assert torch.equal(quantize(weight, scheme).dequantized(), whole.dequantized())


@pytest.mark.parametrize("scheme", schemes.SCHEMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_weights_that_no_scale_reaches_are_refused(scheme, value, weight):
    weight[3, 5] = value
    with pytest.raises(ValueError, match="NaN or beyond 65504"):
        quantize(weight, scheme)


@pytest.mark.parametrize("scheme", schemes.SCHEMES)
def test_weights_too_small_for_a_scale_become_something_finite(scheme):
    record = quantize(torch.full((2, 32), 1e-44), scheme)
    assert record.dequantized().abs().max() < 1e-6
