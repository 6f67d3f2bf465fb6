"""Cuts of many rows at once against `survivors`, which looks at one row and every number in it."""

import numpy as np
import pytest
import torch

from nano.device import HostTransfers
from nano.sampling import cuts
from nano.sampling.cuts import find_cuts, is_truncated
from nano.sampling.truncation import survivors


def random_draws(num_rows: int, generator: np.random.Generator) -> np.ndarray:
    """[N, 4]: temperature, top_p, min_p and top_k, each of the last three off in some rows."""
    is_off = generator.random((num_rows, 3)) < 0.4
    top_p = np.where(is_off[:, 0], 1.0, generator.choice([0.05, 0.5, 0.9, 0.999], num_rows))
    min_p = np.where(is_off[:, 1], 0.0, generator.choice([0.001, 0.1, 0.9, 1.0], num_rows))
    top_k = np.where(is_off[:, 2], 0, generator.choice([1, 2, 7, 60, 10**6], num_rows))
    return np.column_stack([np.ones(num_rows), top_p, min_p, top_k])


def random_rows(kind: str, num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, V], the best 0."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = 3 * torch.randn(num_rows, vocab_size, generator=generator, dtype=dtype)
    if kind == "tied":
        rows = rows.round()
    elif kind == "peaked":
        rows *= 40
    elif kind == "flat":
        rows *= 0
    elif kind == "banned":
        rows[torch.rand(rows.shape, generator=generator) < 0.9] = -torch.inf
        rows[:, 3] = 1.0
    return rows - rows.amax(1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [1, 16, 1000, 6000])
@pytest.mark.parametrize("kind", ["random", "tied", "peaked", "flat", "banned"])
def test_rows_keep_together_what_each_keeps_alone(kind, vocab_size, dtype):
    if kind == "banned" and vocab_size == 1:
        return
    draws = random_draws(120, np.random.default_rng(vocab_size))
    rows = random_rows(kind, 120, vocab_size, dtype)
    found = find_cuts(rows, draws, HostTransfers())
    assert found.dtype == dtype
    for row, cut, (_, top_p, min_p, top_k) in zip(rows, found, draws.tolist()):
        mask = survivors(row, top_k=int(top_k), top_p=top_p, min_p=min_p)
        # Banned tokens have no chance, whether they are cut or not.
        kept = (row >= cut) & row.isfinite()
        expected = row.isfinite() if mask is None else mask & row.isfinite()
        assert torch.equal(kept, expected), (top_p, min_p, top_k)


def test_a_row_is_cut_the_same_in_any_batch(monkeypatch):
    generator = np.random.default_rng(0)
    draws = random_draws(40, generator)
    draws[:, 1] = 1 - generator.random(40) ** 4  # many close to all of the mass
    rows = random_rows("random", 40, 50_000, torch.float32)
    together = find_cuts(rows, draws, HostTransfers())
    monkeypatch.setattr(cuts, "_MOST_SORTED", 150_000)
    assert torch.equal(find_cuts(rows, draws, HostTransfers()), together)
    order = generator.permutation(40)
    assert torch.equal(find_cuts(rows[order], draws[order], HostTransfers()), together[order])
    for i in range(40):
        part = slice(i, i + 1)
        assert torch.equal(find_cuts(rows[part], draws[part], HostTransfers()), together[part])


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 1 - 1e-9])
def test_equal_weights_are_kept_or_cut_together(top_p):
    rows = torch.zeros(2, 9)
    rows[1, 5:] = -2.0
    found = find_cuts(rows, np.array([[1.0, top_p, 0.0, 0]] * 2), HostTransfers())
    assert found.tolist() == [0.0, -2.0 if top_p > 0.9 else 0.0]


def test_rows_that_lose_nothing_are_known_without_a_look():
    draws = np.array([[1, 1, 0, 0], [1, 0.9, 0, 0], [1, 1, 0.1, 0], [1, 1, 0, 3], [0, 0.9, 0.1, 3]])
    assert is_truncated(draws).tolist() == [False, True, True, True, False]
    assert find_cuts(torch.zeros(1, 4), draws[:1], HostTransfers()).tolist() == [-torch.inf]
