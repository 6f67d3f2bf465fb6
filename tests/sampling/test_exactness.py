"""Residual and block acceptance give the target's distribution, over several steps of a request.

One step alone would not do: what is wrong with block acceptance under the wrong keys shows in the
next step, when rejected drafts would come again.
"""

import numpy as np
import pytest
import torch

from nano.sampling.acceptance import AcceptanceRule, BlockRule, ResidualRule
from nano.sampling.cpu_backend import CpuSampling
from nano.sampling.noise import NoiseDomain
from nano.sampling.sampler import Sampler
from nano.sampling_params import SamplingParams
from tests.sampling.chain import count, deviation, excess_distance, law, make_tables, run

V = 4
LENGTH = 5
TABLES = make_tables(V, closeness=0.0)
COUNTS = ((1, 1), (3, 3), (4, 4), (4, 2))  # drafts drawn and, of those, verified: some are trimmed
SETTINGS: list[dict] = [
    {},
    {"temperature": 1.4, "top_k": 3},
    {"top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.1},
    {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.05},
]

pytestmark = pytest.mark.skipif(
    not CpuSampling.is_available(torch.float32, torch.device("cpu")),
    reason="row by row in torch these samples take minutes",
)


class PositionKeyedBlock(BlockRule):
    """The trap: block acceptance with drafts and uniforms keyed as the residual rule keys them."""

    keyed = (NoiseDomain.DRAFT, NoiseDomain.ACCEPTANCE)

    def noise_keys(self, domain, states, row, position):
        rule = ResidualRule if domain in self.keyed else BlockRule
        return rule.noise_keys(self, domain, states, row, position)


class PositionKeyedDrafts(PositionKeyedBlock):
    """Half of it."""

    keyed = (NoiseDomain.DRAFT,)


class SharedDomain(ResidualRule):
    """Drafts drawn with the noise that also draws the token behind them."""

    def noise_keys(self, domain, states, row, position):
        if domain == NoiseDomain.DRAFT:
            domain = NoiseDomain.RESIDUAL
        return super().noise_keys(domain, states, row, position)


def scores(rule: AcceptanceRule, setting: dict, num_requests: int) -> list[tuple[float, float]]:
    """(chi-square, total variation) in standard deviations: of all, and by number of drafts.

    Request i has seed i and COUNTS[i % 4].
    """
    params = [SamplingParams(seed=i, **setting) for i in range(num_requests)]
    mixed = [COUNTS[i % len(COUNTS)] for i in range(num_requests)]
    tokens = run(Sampler(rule=rule), TABLES, params, mixed, LENGTH)
    p = law(TABLES[0], setting, LENGTH)
    groups = [tokens, *(tokens[i :: len(COUNTS)] for i in range(len(COUNTS)))]
    all_counts = [count(group, V) for group in groups]
    assert all(counts[p == 0].sum() == 0 for counts in all_counts)
    return [(deviation(counts, p), excess_distance(counts, p)) for counts in all_counts]


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[-1]], ids=str)
@pytest.mark.parametrize("rule", [ResidualRule(), BlockRule()], ids=lambda r: type(r).__name__)
def test_the_output_over_several_steps_follows_the_target(rule, setting):
    assert np.abs(scores(rule, setting, 12_000)).max() < 4


@pytest.mark.parametrize(
    ("rule", "num_requests"),
    [
        (PositionKeyedBlock(), 12_000),
        (PositionKeyedDrafts(), 12_000),
        pytest.param(SharedDomain(), 60_000, marks=pytest.mark.slow),  # a smaller bias
    ],
    ids=lambda value: type(value).__name__,
)
def test_wrong_keys_are_seen_by_the_same_test(rule, num_requests):
    assert min(scores(rule, {}, num_requests)[0]) > 6


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("rule", [ResidualRule(), BlockRule()], ids=lambda r: type(r).__name__)
def test_the_output_follows_the_target_in_many_samples(rule, setting):
    num_requests = 200_000 if setting in (SETTINGS[0], SETTINGS[-1]) else 20_000
    assert np.abs(scores(rule, setting, num_requests)).max() < 4
