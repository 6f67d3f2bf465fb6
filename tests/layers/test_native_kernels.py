"""Native row operations: right up to rounding, and the same bits in every company."""

import pytest
import torch
from torch import Tensor

from nano.layers.kernels import TorchKernels
from nano.layers.native_kernels import NativeKernels
from nano.native.build import load_threads
from tests.other_cpus import AVX2, FLAGS, computed_with, needs_avx2

pytestmark = pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")

NATIVE, TORCH = NativeKernels(), TorchKernels()
SIZES = [1, 7, 16, 24, 67, 128, 576]


def vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1])) * 3


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_equals_float64_up_to_rounding(size):
    x, weight = vectors(9, 3, size), vectors(size)
    out = NATIVE.rms_norm(x, weight, 1e-5)
    exact = TORCH.rms_norm(x.double(), weight.double(), 1e-5)
    assert (out - exact).abs().max() <= 4e-7 * exact.abs().max()


@pytest.mark.parametrize("size", SIZES)
def test_silu_and_mul_equals_float64_up_to_rounding(size):
    gate_up = vectors(9, 2 * size) * 5
    out = NATIVE.silu_and_mul(gate_up)
    exact = TORCH.silu_and_mul(gate_up.double())
    assert ((out - exact).abs() <= 4e-7 * exact.abs() + 1e-37).all()


def test_silu_of_every_magnitude_is_right_to_a_few_units_in_the_last_place():
    gates = torch.cat([sign * torch.logspace(-30, 1.94, 20_000) for sign in (1, -1)])
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    exact = TORCH.silu_and_mul(gate_up.double())
    error = (NATIVE.silu_and_mul(gate_up) - exact).abs()
    assert (error <= 2.5 * 2**-23 * exact.abs() + 1e-38).all()


def test_silu_of_special_values():
    gates = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 88.8, -88.8, -200.0])
    gate_up = torch.cat((gates, torch.full_like(gates, 2.0)))[None]
    out = NATIVE.silu_and_mul(gate_up)[0]
    expected = TORCH.silu_and_mul(gate_up)[0]
    assert out[:4].tolist() == pytest.approx(expected[:4].tolist(), nan_ok=True)
    assert out[4:].tolist() == pytest.approx([2 * 88.8, 0.0, 0.0], rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(size):
    num_rows = 5000 // size + 40  # beyond what one task takes
    x, weight, gate_up = vectors(num_rows, 3, size), vectors(size), vectors(num_rows, 2 * size)
    normed, product = NATIVE.rms_norm(x, weight, 1e-5), NATIVE.silu_and_mul(gate_up)
    pool = load_threads()
    before = pool.nano_num_threads()
    for num_threads in (1, 2):
        pool.nano_set_num_threads(num_threads)
        for some in (slice(0, 1), slice(3, 20), slice(num_rows - 1, num_rows), slice(0, None)):
            assert torch.equal(NATIVE.rms_norm(x[some], weight, 1e-5), normed[some])
            assert torch.equal(NATIVE.silu_and_mul(gate_up[some]), product[some])
    pool.nano_set_num_threads(before)


def test_heads_of_a_fused_projection_are_read_in_place():
    fused, weight = vectors(5, 4 * 24 + 8), vectors(24)
    heads = fused[:, 8:].unflatten(-1, (4, 24))
    assert not heads.is_contiguous()
    expected = NATIVE.rms_norm(heads.contiguous(), weight, 1e-5)
    assert torch.equal(NATIVE.rms_norm(heads, weight, 1e-5), expected)
    turned = heads.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(NATIVE.rms_norm(turned, weight, 1e-5), expected)
    apart = vectors(5, 60)[:, 10:50]
    assert torch.equal(NATIVE.silu_and_mul(apart), NATIVE.silu_and_mul(apart.contiguous()))


def test_a_nan_stays_in_its_row():
    x, weight = vectors(6, 24), vectors(24)
    clean = NATIVE.rms_norm(x, weight, 1e-5)
    x[2, 5] = float("nan")
    spoilt = NATIVE.rms_norm(x, weight, 1e-5)
    assert spoilt[2].isnan().all()
    others = [0, 1, 3, 4, 5]
    assert torch.equal(spoilt[others], clean[others])


def results() -> list[Tensor]:
    found = []
    for size in SIZES:
        found.append(NATIVE.rms_norm(vectors(9, 3, size), vectors(size), 1e-5))
        found.append(NATIVE.silu_and_mul(vectors(9, 2 * size)))
    return found


@pytest.mark.slow
@needs_avx2
@pytest.mark.parametrize("flags", FLAGS)
def test_another_instruction_set_gives_the_same_values(flags):
    for ours, other in zip(results(), computed_with(flags, results), strict=True):
        torch.testing.assert_close(other, ours, rtol=1e-6, atol=1e-6)
        if flags == AVX2:  # it fuses multiply-adds, too: the same bits
            assert torch.equal(other, ours)
