import pytest
import torch
from torch import Tensor, nn

from nano.layers.cpu_linear import FloatWeight
from nano.layers.embedding import Embedding
from nano.layers.native_kernels import NativeKernels
from nano.layers.row_kernels import RowKernels

IDS = torch.tensor([3, 0, 3, 11])


def make(weight: Tensor) -> Embedding:
    embedding = Embedding(*weight.shape)
    embedding.weight.copy_(weight)
    return embedding


@pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("fits", [True, False])
def test_a_tied_embedding_keeps_a_table_of_half_the_size_if_that_changes_nothing(fits):
    weight = torch.randn(12, 8).bfloat16().float()
    if not fits:
        weight[1, 2] = 1.0 + 2**-20
    embedding = make(weight)
    rows = embedding(IDS)
    embedding.pack(NativeKernels(), for_logits=True)
    assert torch.equal(embedding(IDS), rows)
    assert embedding(IDS).dtype == torch.float32
    assert isinstance(embedding.packed, FloatWeight)
    tables = list(embedding.parameters(recurse=False))
    tables += [b for m in embedding.children() if m is not embedding.packed for b in m.buffers()]
    assert sum(table.nbytes for table in tables) == weight.numel() * (2 if fits else 4)
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(embedding.logits(hidden), hidden @ weight.T)


def test_an_untied_embedding_keeps_nothing_for_logits():
    embedding = make(torch.randn(12, 8))
    rows = embedding(IDS)
    embedding.pack(RowKernels(), for_logits=False)
    assert embedding.packed is None
    assert torch.equal(embedding(IDS), rows)


def test_a_table_given_by_a_loader_is_looked_up():
    class Squares(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return (ids**2).float()[:, None]

    embedding = Embedding(12, 1)
    embedding.weight, embedding.table = None, Squares()
    embedding.pack(RowKernels(), for_logits=True)
    assert embedding(IDS)[:, 0].tolist() == [9.0, 0.0, 9.0, 121.0]
