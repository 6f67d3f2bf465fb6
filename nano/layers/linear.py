"""Linear layers. T tokens; weights are [out, in] as checkpoints store them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from nano.layers.kernels import Kernels
from nano.layers.packed_weight import PackedWeight


class Linear(nn.Module):
    """x [T, in] -> [T, out]. The parameters are uninitialised: a loader fills them.

    `pack` may then trade them for a layout that our kernels read; a loader of quantised weights
    sets `packed` itself.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    packed: PackedWeight | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.packed = None

    def pack(self, kernels: Kernels) -> None:
        """Trade the filled parameters for what `kernels` read."""
        if self.weight is None:
            return  # quantised
        self.packed = kernels.pack(self.weight, self.bias)
        if self.packed is not None:
            self.weight = self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            out: Tensor = self.packed(x)
            return out
        assert self.weight is not None
        return functional.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several projections of one input, computed as one: a single pass over x, one larger GEMM.

    `shard_sizes` maps the name that checkpoints give each projection to its output size. `shards`
    says which rows of `weight` and `bias` belong to it.
    """

    def __init__(self, in_features: int, shard_sizes: Mapping[str, int], bias: bool = False):
        super().__init__(in_features, sum(shard_sizes.values()), bias)
        self.shards: dict[str, slice] = {}
        start = 0
        for name, size in shard_sizes.items():
            self.shards[name] = slice(start, start + size)
            start += size
        self._sizes = list(shard_sizes.values())

    def split(self, out: Tensor) -> tuple[Tensor, ...]:
        """The result of a call [T, out] -> one view [T, size] per shard, in order."""
        return torch.split(out, self._sizes, dim=-1)
