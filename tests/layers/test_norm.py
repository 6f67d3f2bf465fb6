import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from nano.layers.norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_has_the_bits_of_transformers(dtype):
    torch.manual_seed(0)
    ours, theirs = RMSNorm(96, eps=1e-5), LlamaRMSNorm(96, eps=1e-5)
    weight = torch.randn(96)
    ours.weight.copy_(weight)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        x = (torch.randn(7, 3, 96) * 5).to(dtype)
        expected = theirs.to(dtype)(x)
    assert torch.equal(ours.to(dtype)(x), expected)


def test_rms_norm_of_float64_keeps_float64_precision():
    norm = RMSNorm(8, eps=0.0).double()
    norm.weight.fill_(1.0)
    x = torch.randn(4, 8, dtype=torch.float64)
    mean_square = norm(x).square().mean(dim=-1)
    torch.testing.assert_close(mean_square, torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-14)
