"""What deciding about drafts costs per step: trim, choose, and learning from the outcome.

    pytest bench/bench_draft_policy.py

Each request brings four drafts to every step. The curve is flat for as long as there are tokens, so
that drafts are always worth it: an engine that is busy would stop asking.
"""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nano.scheduler.draft_candidate import DraftCandidate
from nano.scheduler.draft_policy import DraftPolicy
from nano.scheduler.step_time import StepLoad, StepTiming
from nano.speculation import ProposerInfo

NUM_DRAFTS = 4
TEXT = ProposerInfo("text", NUM_DRAFTS, is_free=True)
MODEL = ProposerInfo("model", NUM_DRAFTS, is_free=False, pass_seconds=1e-5)


class Engine:
    """Plays the scheduler; half of the requests accept most of their drafts."""

    def __init__(self, proposers: tuple[ProposerInfo, ...], num_requests: int):
        self.policy = DraftPolicy(proposers, [(1, 0.01), (2048, 0.011)])
        self.names = tuple(info.name for info in proposers)
        self.candidates = [
            DraftCandidate(f"request-{index}", self.names, NUM_DRAFTS)
            for index in range(num_requests)
        ]
        self.step()  # nobody is new in what is measured

    def step(self) -> int:
        """Four drafts of the last proposer for each; returns how many were verified."""
        num_requests, proposer = len(self.candidates), self.names[-1]
        load = StepLoad(num_requests, num_requests)
        drafts = {one.request_id: (proposer, NUM_DRAFTS) for one in self.candidates}
        verified = self.policy.trim(drafts, load)
        asked = self.policy.choose(self.candidates, load)
        has_passes = any(MODEL.name == asks[-1].proposer for asks in asked.values())
        num_accepted = 0
        for index, (request_id, num_drafts) in enumerate(verified.items()):
            if num_drafts:
                accepted = min(num_drafts, 3 if index % 2 else 1)
                self.policy.observe(request_id, proposer, num_drafts, accepted)
                num_accepted += accepted
            else:
                self.policy.observe_unverified(request_id, proposer, 1, 1)
        num_verified = sum(verified.values())
        timing = StepTiming(
            num_requests + num_verified, 0.01, 1e-4, 4 * has_passes, num_verified, 0
        )
        self.policy.observe_step(timing, num_requests + num_accepted)
        return num_verified


@pytest.mark.parametrize("num_requests", [1, 64, 256])
@pytest.mark.parametrize(
    "proposers", [(TEXT,), (MODEL,), (TEXT, MODEL)], ids=["text", "model", "both"]
)
def test_a_step_of_requests_with_four_drafts_each(
    benchmark: BenchmarkFixture, proposers: tuple[ProposerInfo, ...], num_requests: int
) -> None:
    engine = Engine(proposers, num_requests)
    benchmark.pedantic(engine.step, rounds=300, warmup_rounds=20)
    assert engine.policy.report()["share_of_steps_with_drafts"] > 0.9
