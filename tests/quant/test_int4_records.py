"""AWQ and GPTQ matrices as records, packed by the test from numbers it knows."""

import numpy as np
import pytest
import torch

from nano.checkpoint.quantization_config import GptqConfig
from nano.errors import CheckpointError
from nano.quant.awq import awq_record
from nano.quant.gptq import gptq_record
from tests.models.int4_files import (
    Grid,
    act_order,
    awq_tensors,
    borrow_one,
    gptq_tensors,
    in_order,
    pack_columns,
)

NUM_INPUTS, NUM_OUTPUTS = 128, 24
SHAPE = NUM_OUTPUTS, NUM_INPUTS
GROUP_SIZES = (32, 64, 128, -1)


def random_grid(groups: np.ndarray, *, least_zero: int = 0) -> Grid:
    rng = np.random.default_rng(5)
    num_groups = int(groups.max()) + 1
    q = rng.integers(0, 16, (len(groups), NUM_OUTPUTS))
    zeros = rng.integers(least_zero, 16, (num_groups, NUM_OUTPUTS))
    scales = rng.uniform(0.01, 0.3, (num_groups, NUM_OUTPUTS)).astype(np.float16)
    return Grid(q, zeros, scales, groups)


def torch_parts(parts: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x) for name, x in parts.items()}


def gptq_config(group_size: int, zeros="less_one", needs_g_idx=False) -> GptqConfig:
    size = None if group_size == -1 else group_size
    return GptqConfig(group_size=size, zeros=zeros, needs_g_idx=needs_g_idx)


def assert_equal(record, grid: Grid) -> None:
    assert torch.equal(record.dequantized(), torch.from_numpy(grid.dequantized()))


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_awq_weights_are_exactly_quant_less_zero_times_scale(group_size):
    grid = random_grid(in_order(NUM_INPUTS, group_size))
    size = None if group_size == -1 else group_size
    record = awq_record(torch_parts(awq_tensors(grid)), SHAPE, size)
    assert record.input_order is None
    assert_equal(record, grid)


@pytest.mark.parametrize("zeros", ["less_one", "borrowed", "plain"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_gptq_zero_points_of_every_format_are_read(group_size, zeros):
    grid = random_grid(in_order(NUM_INPUTS, group_size))
    assert 0 in grid.zeros
    parts = torch_parts(gptq_tensors(grid, zeros))
    record = gptq_record(parts, SHAPE, gptq_config(group_size, zeros))
    assert record.input_order is None
    assert_equal(record, grid)


def test_without_a_zero_point_of_zero_a_borrowing_tool_writes_what_others_do():
    zeros = random_grid(in_order(NUM_INPUTS, 32), least_zero=1).zeros
    assert np.array_equal(
        borrow_one(pack_columns(zeros, tuple(range(8)))), pack_columns(zeros - 1, tuple(range(8)))
    )


@pytest.mark.parametrize("group_size", [32, 64])
def test_act_order_sorts_the_inputs_by_their_group(group_size):
    groups = act_order(NUM_INPUTS, group_size)
    grid = random_grid(groups)
    record = gptq_record(
        torch_parts(gptq_tensors(grid)), SHAPE, gptq_config(group_size, needs_g_idx=True)
    )
    assert record.input_order is not None
    assert groups[record.input_order.numpy()].tolist() == in_order(NUM_INPUTS, group_size).tolist()
    assert_equal(record, grid)


def test_act_order_over_one_group_changes_nothing():
    grid = random_grid(act_order(NUM_INPUTS, -1))
    record = gptq_record(torch_parts(gptq_tensors(grid)), SHAPE, gptq_config(-1, needs_g_idx=True))
    assert record.input_order is None
    assert_equal(record, grid)


def test_gptq_without_a_table_of_groups_takes_the_inputs_in_order_unless_it_needs_one():
    grid = random_grid(in_order(NUM_INPUTS, 32))
    parts = torch_parts(gptq_tensors(grid))
    del parts["g_idx"]
    assert_equal(gptq_record(parts, SHAPE, gptq_config(32)), grid)
    with pytest.raises(CheckpointError, match="g_idx is absent, which desc_act true implies"):
        gptq_record(parts, SHAPE, gptq_config(32, needs_g_idx=True))


def test_a_table_of_uneven_groups_is_refused():
    groups = in_order(NUM_INPUTS, 32)
    parts = torch_parts(gptq_tensors(random_grid(groups)))
    parts["g_idx"][0] = 1
    with pytest.raises(CheckpointError, match="g_idx does not part 128 inputs in groups of 32"):
        gptq_record(parts, SHAPE, gptq_config(32))


@pytest.mark.parametrize(
    ("part", "value", "match"),
    [
        ("qweight", torch.zeros(16, 23, dtype=torch.int32), r"qweight has shape \(16, 23\)"),
        ("qzeros", torch.zeros(2, 3, dtype=torch.int32), r"qzeros .*\(2, 3\), expected \(4, 3\)"),
        ("qzeros", torch.zeros(4, 3, dtype=torch.int64), "qzeros is torch.int64, expected"),
        ("scales", torch.zeros(4, 23), r"scales has shape \(4, 23\), expected \(4, 24\)"),
        ("g_idx", torch.zeros(64, dtype=torch.int32), r"g_idx has shape \(64,\)"),
    ],
)
def test_parts_of_other_shapes_are_refused_by_name(part, value, match):
    """A group size or width that only some modules have shows as such."""
    parts = torch_parts(gptq_tensors(random_grid(in_order(NUM_INPUTS, 32))))
    with pytest.raises(CheckpointError, match=match):
        gptq_record(parts | {part: value}, SHAPE, gptq_config(32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_either_half_precision_are_exact(dtype):
    grid = random_grid(in_order(NUM_INPUTS, 32))
    parts = torch_parts(awq_tensors(grid))
    parts["scales"] = parts["scales"].to(dtype)
    weight = awq_record(parts, SHAPE, 32).dequantized()
    steps = parts["scales"].float().numpy()[grid.groups]
    expected = ((grid.q - grid.zeros[grid.groups]).astype(np.float32) * steps).T
    assert torch.equal(weight, torch.from_numpy(np.ascontiguousarray(expected)))
