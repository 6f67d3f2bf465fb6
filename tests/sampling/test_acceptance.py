"""Acceptance rules by enumeration: every draft, and the uniforms integrated."""

import itertools

import numpy as np
import pytest
import torch

from nano.sampling.acceptance import (
    AcceptanceRule,
    BlockRule,
    DraftedRequests,
    ResidualRule,
    SyntheticRule,
    make_rule,
)
from tests.sampling.chain import FIRST, law, make_tables, processed

RULES = [ResidualRule(), BlockRule()]
NEARLY_ONE = 1 - 2.0**-53


def distributions(setting: dict, closeness: float = 0.6) -> list[torch.Tensor]:
    """p and q by last token: [3, 3] float32."""
    return [
        torch.from_numpy(np.stack([processed(row, setting) for row in table.numpy()])).float()
        for table in make_tables(3, closeness)
    ]


def make_drafts(p: torch.Tensor, q: torch.Tensor, token_ids: np.ndarray) -> DraftedRequests:
    """Requests that all start behind FIRST. p, q: by last token; token_ids: [N, K]."""
    num_requests, k = token_ids.shape
    last = np.concatenate((np.full((num_requests, 1), FIRST), token_ids), axis=1)
    return DraftedRequests(
        num_drafts=np.full(num_requests, k),
        token_ids=token_ids,
        uniforms=np.full(token_ids.shape, 0.5),
        p=p[last.ravel()],
        q=q[last[:, :-1].ravel()],
    )


def chances(rule: AcceptanceRule, drafts: DraftedRequests) -> np.ndarray:
    """[N, K + 1]: how likely each number of accepted drafts is, for the drafts as they are.

    Each uniform is compared with a number of its own; bisection finds it through `judge`.
    """
    num_requests, k = drafts.token_ids.shape
    chance = np.zeros((num_requests, k))
    is_sequential = isinstance(rule, ResidualRule)
    for i in range(k):
        low, high = np.zeros(num_requests), np.ones(num_requests)
        for _ in range(50):
            middle = (low + high) / 2
            drafts.uniforms[:] = NEARLY_ONE  # no other test passes
            if is_sequential:
                drafts.uniforms[:, :i] = 0.0  # all before must
            drafts.uniforms[:, i] = middle
            passes = rule.judge(drafts).num_accepted > i
            low, high = np.where(passes, middle, low), np.where(passes, high, middle)
        chance[:, i] = np.round(low, 14)
    out = np.ones((num_requests, k + 1))
    for tau in range(k + 1):
        if is_sequential:
            out[:, tau] = chance[:, :tau].prod(axis=1)
            out[:, tau] *= 1 - chance[:, tau] if tau < k else 1.0
        else:
            out[:, tau] = (1 - chance[:, tau:]).prod(axis=1)
            out[:, tau] *= chance[:, tau - 1] if tau else 1.0
    return out


def one_step(rule: AcceptanceRule, p: torch.Tensor, q: torch.Tensor, k: int):
    """Exactly: the law of the first k + 1 tokens, [V] * (k + 1), and the mean accepted number.

    One step, then the target as it is.
    """
    vocab_size = len(p)
    token_ids = np.array(list(itertools.product(range(vocab_size), repeat=k)))
    drafts = make_drafts(p, q, token_ids)
    last = np.concatenate((np.full((len(token_ids), 1), FIRST), token_ids), axis=1)
    weight = q.double().numpy()[last[:, :-1], token_ids].prod(axis=1)  # of these drafts
    chance = chances(rule, drafts)
    joint = np.zeros((vocab_size,) * (k + 1))
    exact = p.double().numpy()
    for tau in range(k + 1):
        # As if tau were the number: the scale must be what `judge` gives with it.
        drafts.uniforms[:] = NEARLY_ONE
        drafts.uniforms[:, :tau] = 1e-300
        verdict = rule.judge(drafts)
        for n in np.flatnonzero(chance[:, tau] * weight > 0):
            if tau == k:
                final = exact[last[n, k]]
            else:
                assert verdict.num_accepted[n] == tau
                rest = drafts.residual(np.array([n]), np.array([tau]), verdict.scale[n : n + 1])[0]
                final = (rest / rest.sum()).numpy()
            for token, probability in enumerate(final):
                rest_law = np.array(probability)
                if tau < k:
                    rest_law = probability * continuation(exact, token, k - tau)
                joint[(*token_ids[n, :tau], token)] += weight[n] * chance[n, tau] * rest_law
    return joint, float((chance @ np.arange(k + 1) * weight).sum())


def continuation(p: np.ndarray, last: int, length: int) -> np.ndarray:
    joint = p[last]
    for _ in range(length - 1):
        joint = joint[..., None] * p
    return joint


@pytest.mark.parametrize("setting", [{}, {"temperature": 1.3, "top_k": 2}, {"top_p": 0.7}], ids=str)
@pytest.mark.parametrize("closeness", [0.6, -0.5])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_one_step_gives_exactly_the_law_of_the_target(rule, k, closeness, setting):
    joint, _ = one_step(rule, *distributions(setting, closeness), k)
    np.testing.assert_allclose(joint, law(make_tables(3)[0], setting, k + 1), atol=3e-7)


def test_block_accepts_eleven_ninths_where_residual_accepts_ten():
    # The example of Sun et al.: two tokens, two drafts, no context.
    p, q = (torch.tensor([row, row]) for row in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    assert one_step(ResidualRule(), p, q, 2)[1] == pytest.approx(10 / 9, abs=1e-6)
    assert one_step(BlockRule(), p, q, 2)[1] == pytest.approx(11 / 9, abs=1e-6)


@pytest.mark.parametrize("setting", [{}, {"top_k": 2}, {"temperature": 0.5, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_block_never_accepts_fewer_than_residual(k, setting):
    p, q = distributions(setting)
    residual, block = (one_step(rule, p, q, k)[1] for rule in RULES)
    assert block >= residual - 1e-6
    if k == 1:
        assert block == pytest.approx(residual, abs=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_ragged_requests_are_judged_as_each_alone(rule):
    generator = np.random.default_rng(0)
    vocab_size, num_drafts = 50_000, np.array([3, 1, 4, 2])
    p = torch.softmax(torch.randn(14, vocab_size, generator=torch.manual_seed(0)), dim=1)
    q = torch.softmax(torch.randn(10, vocab_size), dim=1) * 0.3 + 0.7 * p[:10]
    token_ids = generator.integers(0, vocab_size, (4, 4))
    uniforms = generator.random((4, 4)) * 0.2
    together = rule.judge(DraftedRequests(num_drafts, token_ids, uniforms, p, q))
    assert len(set(together.num_accepted.tolist())) > 1
    p_parts, q_parts = p.split((num_drafts + 1).tolist()), q.split(num_drafts.tolist())
    for n, k in enumerate(num_drafts.tolist()):
        part = slice(n, n + 1), slice(k)
        alone = rule.judge(
            DraftedRequests(
                num_drafts[n : n + 1], token_ids[part], uniforms[part], p_parts[n], q_parts[n]
            )
        )
        assert alone.num_accepted[0] == together.num_accepted[n]
        assert alone.scale[0] == together.scale[n]  # to the last bit


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_draft_that_its_distribution_cannot_give_is_rejected(rule):
    p, q = torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([[1.0, 0.0]])
    drafts = DraftedRequests(np.array([1]), np.array([[1]]), np.array([[1e-9]]), p, q)
    assert rule.judge(drafts).num_accepted.tolist() == [0]


def synthetic_counts(rule: AcceptanceRule, num_drafts: np.ndarray) -> np.ndarray:
    uniforms = np.random.default_rng(3).random((len(num_drafts), 4))
    empty = torch.empty(0, 8)
    drafts = DraftedRequests(num_drafts, np.zeros((len(num_drafts), 4)), uniforms, empty, empty)
    return rule.judge(drafts).num_accepted


def test_synthetic_rates_come_out_and_nothing_is_accepted_beyond_them():
    accepted = synthetic_counts(make_rule("synthetic", rates=(0.9, 0.5, 0.2)), np.full(20_000, 4))
    for position, rate in enumerate((0.9, 0.5, 0.2, 0.0)):
        deviation = (0.25 / 20_000) ** 0.5
        assert abs((accepted > position).mean() - rate) <= 4 * deviation * (rate > 0)


@pytest.mark.parametrize("length", [1.0, 1.6, 3.0, 4.25, 5.0])
def test_a_synthetic_length_is_the_mean_number_of_tokens_per_step(length):
    accepted = synthetic_counts(SyntheticRule(None, length), np.full(20_000, 4))
    assert abs(1 + accepted.mean() - length) < 4 * 0.5 / 20_000**0.5


def test_synthetic_acceptance_ends_with_the_drafts_there_are():
    num_drafts = np.array([1, 2, 3, 4])
    assert synthetic_counts(SyntheticRule(None, 5.0), num_drafts).tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="either"):
        SyntheticRule((0.5,), 2.0)


def test_rules_have_their_names():
    assert make_rule("match") is None
    assert isinstance(make_rule("residual"), ResidualRule)
    assert isinstance(make_rule("block"), BlockRule)
