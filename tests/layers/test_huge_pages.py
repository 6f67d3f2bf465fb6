import pytest
import torch
from torch import nn

from nano.layers.cpu_linear import FloatWeight
from nano.layers.huge_pages import move_to_huge_pages
from nano.layers.row_kernels import RowWeight


def test_packed_weights_keep_their_values_and_lie_one_behind_the_other():
    weights = [RowWeight(torch.randn(9, 7), torch.randn(9) if i else None) for i in range(3)]
    weights.append(RowWeight(torch.randn(5, 3).bfloat16(), None))
    before = [(w.weight.clone(), None if w.bias is None else w.bias.clone()) for w in weights]
    model = nn.Sequential(*weights, nn.Linear(3, 3))
    untouched = model[-1].weight.data_ptr()
    move_to_huge_pages(model)
    places = []
    for weight, (values, bias) in zip(weights, before, strict=True):
        assert torch.equal(weight.weight, values)
        assert bias is None or torch.equal(weight.bias, bias)
        assert dict(weight.named_buffers())["weight"] is weight.weight
        places += [buffer.data_ptr() for buffer in weight.buffers()]
    assert places == sorted(places)
    assert places[-1] - places[0] < 4096 * len(places)
    assert all(place % 64 == 0 for place in places)
    assert model[-1].weight.data_ptr() == untouched


def test_a_model_without_packed_weights_is_left_alone():
    model = nn.Linear(3, 3)
    move_to_huge_pages(model)
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]


@pytest.mark.skipif(not FloatWeight.is_available(), reason="needs a C++ compiler")
def test_a_moved_weight_computes_the_same():
    weight = FloatWeight.pack(torch.randn(70, 33), torch.randn(70))
    x = torch.randn(5, 33)
    before = weight(x)
    move_to_huge_pages(weight)
    assert torch.equal(weight(x), before)
