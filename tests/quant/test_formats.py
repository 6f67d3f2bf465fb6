"""Every packed format: chosen by name, looked up by rows, traced."""

import pytest
import torch
from torch import nn

from nano.layers.cpu_linear import FLOAT_FORMATS, FloatWeight
from nano.layers.huge_pages import move_to_huge_pages
from nano.quant.formats import FORMATS, SplitWeight, pack
from nano.quant.int4_weight import W4A8Weight
from nano.quant.int8_weight import W8A8Weight
from tests.quant.matrices import affine4, biases, inputs, symmetric8

pytestmark = pytest.mark.skipif(
    not (FloatWeight.is_available() and W4A8Weight.is_available() and W8A8Weight.is_available()),
    reason="needs a C++ compiler",
)

QUANTISED = ["int4", "w4a8", "int8", "w8a8"]


def record(format, shape):
    if format in ("int4", "w4a8"):
        return affine4(shape, 32, is_float16=False)
    return symmetric8(shape, shape[1])


def make(format, shape=(130, 67), *, has_bias=True):
    bias = biases(shape[0]) if has_bias else None
    if format in FLOAT_FORMATS:
        return pack(torch.randn(shape), bias, format)
    if format == "split":
        return SplitWeight([make(part, has_bias=has_bias) for part in ("int8", "int4", "float32")])
    return pack(record(format, shape), bias, format)


def test_every_format_is_registered_under_its_name():
    floats = ["float32", "bfloat16", "w16a16"]
    assert list(FORMATS) == [*floats, "int4", "w4a8", "int8", "w8a8", "split"]
    for name, kind in FORMATS.items():
        assert kind.format == name


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_is_moved_computes_the_same(format):
    weight = make(format)
    x = inputs(67)
    before = weight(x)
    move_to_huge_pages(weight)
    assert torch.equal(weight(x), before)


@pytest.mark.parametrize("format", QUANTISED)
def test_a_table_looks_up_rows_of_the_dequantised_matrix(format):
    weight = make(format)
    ids = torch.tensor([129, 0, 64, 63, 64])
    table = weight.as_table()
    assert torch.equal(weight.dequantized(), record(format, (130, 67)).dequantized())
    assert torch.equal(table(ids), weight.dequantized()[ids])
    assert table(ids[:0]).shape == (0, 67)
    assert torch.equal(table(ids.to(torch.int32)), table(ids))
    both = nn.ModuleList([table, weight])
    assert len(list(both.buffers())) == len(list(weight.buffers()))  # no copy
    with pytest.raises(RuntimeError, match="row 130 of a matrix of 130"):
        table(torch.tensor([130]))


def test_the_parts_of_a_split_weight_lie_side_by_side():
    split = make("split", has_bias=True)
    x = inputs(67)
    assert split.num_outputs == 390
    assert torch.equal(split(x), torch.cat([part(x) for part in split.parts], dim=1))
    assert torch.equal(split.dequantized(), torch.cat([part.dequantized() for part in split.parts]))
    with pytest.raises(ValueError, match=r"parts of \[67, 64\] inputs"):
        SplitWeight([split.parts[0], make("int8", (40, 64))])


@pytest.mark.parametrize("format", FORMATS)
def test_one_graph_serves_any_number_of_rows(format):
    weight = make(format)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(weight, backend=backend, fullgraph=True)
    x = inputs(67)
    for num_rows in (3, 1, 8, 70):
        rows = x[:num_rows].clone()
        torch._dynamo.decorators.mark_unbacked(rows, 0)
        assert torch.equal(compiled(rows), weight(rows))
    assert len(graphs) == 1


def test_what_a_format_cannot_hold_is_refused_by_name():
    with pytest.raises(ValueError, match="format int8 does not hold such a record; int4, w4a8 do"):
        pack(affine4((40, 96), 32), None, "int8")
    with pytest.raises(ValueError, match="format w4a8 does not hold such a record; int8, w8a8 do"):
        pack(symmetric8((40, 96), 32), None, "w4a8")
    with pytest.raises(ValueError, match="floats in format int4: quantise them first"):
        pack(torch.randn(40, 96), None, "int4")
