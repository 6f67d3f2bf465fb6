"""RMSNorm: scale each vector to unit root mean square."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x [..., size] -> same shape and dtype, computed in float32 or wider.

    The scaled vector is rounded to x's dtype *before* the weight multiplies it, as in Hugging
    Face; in bfloat16 the other order gives other bits.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(mean_square + self.eps)).to(x.dtype)
