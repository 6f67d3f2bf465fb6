"""The twin of the native kernels that needs no compiler keeps their promise."""

import pytest
import torch
from torch import Tensor

from nano.layers.row_kernels import RowKernels, RowWeight

ROWS = RowKernels()
SHAPES = [(64, 8), (40, 24), (1, 1), (130, 515), (17, 67)]  # aligned rows, and rows that are not


@pytest.fixture
def any_num_threads():
    before = torch.get_num_threads()
    yield (1, 2)
    torch.set_num_threads(before)


def make(num_outputs: int, num_inputs: int) -> tuple[RowWeight, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_outputs)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    bias = torch.randn(num_outputs, generator=generator)
    x = torch.randn(33, num_inputs, generator=generator)
    return ROWS.pack(weight, bias), x, x.double() @ weight.double().T + bias.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows_and_threads(shape, any_num_threads):
    weight, x, exact = make(*shape)
    whole = weight(x)
    torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-4)
    for num_threads in any_num_threads:
        torch.set_num_threads(num_threads)
        for num_rows in (1, 2, 3, 8, 17, 33):
            assert torch.equal(weight(x[:num_rows]), whole[:num_rows])
            assert torch.equal(weight(x[-num_rows:]), whole[-num_rows:])
        apart = torch.randn(33, shape[1] + 3)[:, 3:].copy_(x)
        assert torch.equal(weight(apart), whole)


@pytest.mark.parametrize("size", [8, 24, 67, 128, 1000])
def test_norms_and_activations_of_a_row_depend_on_the_row_alone(size, any_num_threads):
    generator = torch.Generator().manual_seed(size)
    x, weight = torch.randn(300, 3, size, generator=generator), torch.randn(size)
    gate_up = torch.randn(300, 2 * size, generator=generator)
    normed, product = ROWS.rms_norm(x, weight, 1e-5), ROWS.silu_and_mul(gate_up)
    for num_threads in any_num_threads:
        torch.set_num_threads(num_threads)
        for some in (slice(0, 1), slice(5, 8), slice(11, 200), slice(0, None)):
            assert torch.equal(ROWS.rms_norm(x[some], weight, 1e-5), normed[some])
            assert torch.equal(ROWS.silu_and_mul(gate_up[some]), product[some])
