import pytest
import torch

from nano.layers.linear import FusedLinear, Linear


@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_linear_equals_its_shards_computed_apart(bias):
    torch.manual_seed(0)
    fused = FusedLinear(16, {"q_proj": 8, "k_proj": 4, "v_proj": 6}, bias=bias).double()
    for parameter in fused.parameters():
        parameter.normal_()
    x = torch.randn(5, 16, dtype=torch.float64)
    parts = fused.split(fused(x))
    assert [part.shape for part in parts] == [(5, 8), (5, 4), (5, 6)]
    for part, rows in zip(parts, fused.shards.values(), strict=True):
        apart = x @ fused.weight[rows].T
        if fused.bias is not None:
            apart = apart + fused.bias[rows]
        torch.testing.assert_close(part, apart)


def test_shards_cover_the_weight_in_order_without_overlap():
    fused = FusedLinear(2, {"gate_proj": 3, "up_proj": 5})
    assert fused.shards == {"gate_proj": slice(0, 3), "up_proj": slice(3, 8)}
    assert fused.weight.shape == (8, 2)


def test_a_linear_without_bias_has_no_bias_parameter():
    assert [name for name, _ in Linear(2, 3).named_parameters()] == ["weight"]
    assert [name for name, _ in Linear(2, 3, bias=True).named_parameters()] == ["weight", "bias"]
