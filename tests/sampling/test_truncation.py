"""Top-k, top-p and min-p against the obvious sort."""

import numpy as np
import pytest
import torch

from nano.sampling.truncation import survivors, top_p_threshold


def survivors_by_sort(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, on a full sort in float64; assumes no ties."""
    x = logits.double().numpy()
    kept = np.argsort(-x)
    if min_p > 0:
        kept = kept[x[kept] >= x.max() + np.log(min_p)]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        p = np.exp(x[kept] - x.max())
        p /= p.sum()
        reached = np.cumsum(p) >= top_p
        kept = kept[: int(np.argmax(reached)) + 1 if reached.any() else len(kept)]
    return set(kept.tolist())


def kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    mask = survivors(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    return set(range(len(logits))) if mask is None else set(mask.nonzero().flatten().tolist())


@pytest.mark.parametrize("vocab_size", [16, 300, 50_000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999, 0.0),
        (0, 1e-6, 0.0),
        (0, 1.0, 0.2),
        (9, 0.8, 0.0),
        (9, 0.8, 0.01),
        (10**6, 0.7, 0.3),
    ],
)
def test_survivors_equal_a_full_sort(vocab_size, spread, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(vocab_size)
    for _ in range(3):
        logits = torch.randn(vocab_size, generator=generator) * spread
        logits -= logits.max()
        ours = kept(logits, top_k=top_k, top_p=top_p, min_p=min_p)
        expected = survivors_by_sort(logits, top_k, top_p, min_p)
        if vocab_size < 50_000:
            assert ours == expected
        else:  # float32 against float64 sums may move the cut by a token of vanishing weight
            assert len(ours ^ expected) <= 2


def test_nothing_is_truncated_when_nothing_is_asked():
    assert survivors(torch.randn(50), top_k=0, top_p=1.0, min_p=0.0) is None


def test_tokens_tied_with_the_last_survivor_survive():
    logits = torch.tensor([-1.0, 0.0, 0.0, -2.0, 0.0])
    assert kept(logits, top_k=2) == {1, 2, 4}
    assert kept(logits, top_p=0.3) == {1, 2, 4}


@pytest.mark.parametrize("vocab_size", [200, 10_000])
def test_banned_tokens_never_survive_even_at_a_generous_top_p(vocab_size):
    logits = torch.full((vocab_size,), float("-inf"))
    logits[:100] = torch.randn(100)
    logits -= logits.max()
    assert max(kept(logits, top_p=0.9999999)) < 100


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.99999])
def test_the_histogram_and_the_sort_find_the_same_threshold(top_p):
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(20_000, generator=generator) ** 8
    by_histogram = top_p_threshold(weights, top_p)
    ordered = weights.sort(descending=True).values.double()
    reached = ordered.cumsum(0) >= top_p * ordered.sum()
    assert by_histogram == float(ordered[int(reached.to(torch.int8).argmax())])


def test_threads_do_not_move_the_threshold():
    weights = torch.rand(200_000, generator=torch.Generator().manual_seed(2)) ** 4
    before = torch.get_num_threads()
    found = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found.append(top_p_threshold(weights, 0.95))
    torch.set_num_threads(before)
    assert found[0] == found[1]
