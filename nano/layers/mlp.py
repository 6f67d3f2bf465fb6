"""The feed-forward half of a decoder layer."""

from torch import Tensor, nn

from nano.layers.kernels import Kernels, TorchKernels
from nano.layers.linear import FusedLinear, Linear


class SwiGLU(nn.Module):
    """x [T, hidden] -> [T, hidden]: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool):
        super().__init__()
        shard_sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, shard_sizes, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)
        self.kernels: Kernels = TorchKernels()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.kernels.silu_and_mul(self.gate_up_proj(x)))
        return out
