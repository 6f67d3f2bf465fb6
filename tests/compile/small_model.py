"""A model of another kind than the engine's, for the compiling child: importable there."""

import torch
from torch import Tensor, nn

from nano.compile.request import CompileRequest
from nano.compile.skeleton import describe, dump_skeleton


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(40.0).reshape(10, 4), requires_grad=False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table[ids]
        return rows * self.scale + rows


def small_request(model: Small) -> CompileRequest:
    return CompileRequest(
        description=describe(model),
        inputs={"ids": ("int64", "num_tokens")},
        split_ops=(),
        skeleton=dump_skeleton(model),
    )
