"""The packed linear kernels: right up to rounding, and the same bits in every company."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nano.layers.cpu_linear import FLOAT_FORMATS, FloatWeight, fits_bfloat16
from nano.layers.linear import Linear
from nano.layers.native_kernels import NativeKernels
from nano.native.build import load_threads
from tests.other_cpus import AVX2, FLAGS, computed_with, needs_avx2

pytestmark = pytest.mark.skipif(not FloatWeight.is_available(), reason="needs a C++ compiler")

# Outputs that fill no panel, one, one and a bit; inputs of no, half and several chunks.
SHAPES = [(64, 8), (40, 24), (1, 1), (192, 576), (130, 1100), (321, 67)]
# On either side of every change of method: one row, few, many, tiles that are uneven.
NUM_ROWS = [*range(1, 18), 25, 70]
STORAGES = list(FLOAT_FORMATS)
IN_FLOAT32 = ["float32", "bfloat16"]  # the others round the inputs


def make(
    num_outputs: int, num_inputs: int, storage: str, has_bias: bool = True
) -> tuple[FloatWeight, Tensor]:
    generator = torch.Generator().manual_seed(num_outputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    x = torch.randn(70, num_inputs, generator=generator)
    return FloatWeight.pack(weight, bias, storage), x


@pytest.fixture
def set_num_threads():
    pool = load_threads()
    before = pool.nano_num_threads()
    yield pool.nano_set_num_threads
    pool.nano_set_num_threads(before)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_float64_up_to_rounding(shape, has_bias, storage):
    weight, x = make(*shape, storage, has_bias)
    bias = None if weight.bias is None else weight.bias.double()
    seen = x if storage in IN_FLOAT32 else x.bfloat16()
    exact = functional.linear(seen.double(), weight.dequantized().double(), bias)
    for num_rows in NUM_ROWS:
        out = weight(x[:num_rows])
        assert out.shape == (num_rows, shape[0])
        error = (out - exact[:num_rows]).abs().max()
        assert error <= 2e-6 * shape[1] ** 0.5 * exact.abs().max()


@pytest.mark.parametrize("storage", STORAGES)
def test_no_thread_computes_with_rows_of_an_earlier_call(storage, set_num_threads):
    weight, x = make(1280, 64, storage)
    set_num_threads(1)
    alone = torch.cat([weight(row) for row in x.split(1)])
    set_num_threads(2)
    for num_rows in (2, 8, 2):
        for first in range(x.shape[0] - num_rows):
            some = slice(first, first + num_rows)
            assert torch.equal(weight(x[some]), alone[some])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(
    shape, storage, set_num_threads
):
    weight, x = make(*shape, storage)
    whole = weight(x)
    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)
        for num_rows in NUM_ROWS:
            assert torch.equal(weight(x[:num_rows]), whole[:num_rows])
        assert torch.equal(weight(x[33:34]), whole[33:34])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("num_outputs", [40, 192])
def test_no_number_of_rows_leaves_an_output_out(num_outputs, storage, set_num_threads):
    """Around every tile and every block of rows that a kernel cuts them into."""
    weight, _ = make(num_outputs, 20, storage)
    x = torch.randn(460, 20)
    whole = torch.cat([weight(row[None]) for row in x])
    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)
        for num_rows in range(1, len(x) + 1):
            weight(-x[:num_rows])  # what is left out would be found in the memory it leaves
            assert torch.equal(weight(x[:num_rows]), whole[:num_rows])


@pytest.mark.parametrize("num_rows", [1, 5, 8, 70])
def test_each_output_is_one_chain_of_sums_over_the_inputs(num_rows):
    # Small integers: every order gives the sum. A huge pair that cancels shows where it was added.
    weight = torch.ones(64, 6)
    x = torch.tensor([1.0, 2.0**60, 1.0, -(2.0**60), 1.0, 1.0]).expand(num_rows, -1)
    out = FloatWeight.pack(weight, torch.full((64,), 0.5))(x)
    assert torch.equal(
        out, torch.full((num_rows, 64), 2.5)
    )  # what came before the cancelling is lost


def test_storing_as_bfloat16_changes_no_bit():
    rounded, x = make(130, 96, "bfloat16")
    wide = FloatWeight.pack(rounded.dequantized(), rounded.bias, "float32")
    for num_rows in NUM_ROWS:
        assert torch.equal(rounded(x[:num_rows]), wide(x[:num_rows]))


def test_bfloat16_is_chosen_only_if_it_holds_every_weight():
    weight = torch.randn(70, 96).bfloat16().float()
    assert fits_bfloat16(weight)
    assert FloatWeight.pack(weight, None).format == "bfloat16"
    weight[69, 95] = 1.0 + 2**-20
    assert not fits_bfloat16(weight)
    assert FloatWeight.pack(weight, None).format == "float32"
    forced = FloatWeight.pack(weight, None, "bfloat16")
    assert forced.format == "bfloat16"
    assert torch.equal(forced.dequantized(), weight.bfloat16().float())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_keeps_every_weight(shape, storage):
    weight = torch.randn(*shape).bfloat16().float()
    assert torch.equal(FloatWeight.pack(weight, None, storage).dequantized(), weight)


@pytest.mark.parametrize("storage", ["float32", "w16a16"])
def test_nan_and_infinity_stay_in_their_row(storage):
    weight, x = make(40, 24, storage)
    clean = weight(x)
    x[3, 5], x[7, 0] = float("nan"), float("inf")
    spoilt = weight(x)
    others = [i for i in range(70) if i not in (3, 7)]
    assert spoilt[3].isnan().all()
    assert not spoilt[7].isfinite().any()
    assert torch.equal(spoilt[others], clean[others])


def test_a_linear_layer_computes_the_same_before_and_after_packing():
    layer = Linear(96, 48, bias=True)
    for parameter in layer.parameters():
        parameter.normal_()
    x = torch.randn(7, 96)
    before = layer(x)
    layer.pack(NativeKernels())
    assert list(layer.parameters()) == []  # the unpacked copy is gone
    torch.testing.assert_close(layer(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8, 3.3e38, 2**-126])
def test_inputs_are_rounded_to_the_nearest_bfloat16_halves_to_even(value):
    weight = FloatWeight.pack(torch.eye(3), None, "w16a16")
    x = torch.full((2, 3), value)
    assert torch.equal(weight(x), x.bfloat16().float())


@pytest.mark.parametrize("storage", ["float32", "w16a16"])
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_rows_that_lie_apart_are_read_right(num_rows, storage):
    weight, x = make(48, 96, storage)
    apart = torch.randn(70, 200)[:, 50:146].copy_(x)[:num_rows]
    assert num_rows == 1 or not apart.is_contiguous()
    assert torch.equal(weight(apart), weight(x)[:num_rows])
    turned = x[:num_rows].T.contiguous().T
    assert torch.equal(weight(turned), weight(x)[:num_rows])


def test_no_rows_give_no_rows():
    weight, x = make(48, 96, "bfloat16")
    assert weight(x[:0]).shape == (0, 48)


def results() -> dict[str, list[Tensor]]:
    found = {}
    for storage in STORAGES:
        weight, x = make(130, 1100, storage)
        found[storage] = [weight(x[:num_rows]) for num_rows in NUM_ROWS]
    return found


@pytest.mark.slow
@needs_avx2
@pytest.mark.parametrize("flags", FLAGS)
def test_another_instruction_set_gives_the_same_sums(flags):
    others = computed_with(flags, results)
    for storage, outputs in results().items():
        for ours, other in zip(outputs, others[storage], strict=True):
            torch.testing.assert_close(other, ours, rtol=1e-4, atol=1e-4)
            if (
                flags == AVX2 and storage in IN_FLOAT32
            ):  # it fuses multiply-adds, too: the same bits
                assert torch.equal(other, ours)
