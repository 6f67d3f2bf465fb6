"""DraftPlan: the best drafts of one model beside what a step is decided to have. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nano.scheduler.acceptance import DraftSlots
from nano.scheduler.draft_candidate import DraftCandidate
from nano.scheduler.step_time import StepCosts, StepLoad

_MOST_PREFIXES = 64  # that are compared for one number of passes


@dataclass(slots=True)
class DraftStep:
    """A step as far as it is decided. Numbers are expected ones."""

    load: StepLoad
    gain: float = 0.0  # output tokens
    num_drafts: float = 0.0
    draft_seconds: float = 0.0
    passes: dict[str, int] = field(default_factory=dict)  # of each model
    trials: list[str] = field(default_factory=list)  # models of which these are all

    def rates(
        self,
        costs: StepCosts,
        tokens: float | NDArray[np.float64],
        num_drafts: float | NDArray[Any],
        draft_seconds: float | NDArray[np.float64] = 0.0,
    ) -> NDArray[np.float64]:
        """Tokens per second if it gives `tokens` from `num_drafts` drafts, and makes more."""
        seconds = costs.step(self.load, num_drafts)
        return tokens / (seconds + self.draft_seconds + draft_seconds)


@dataclass(slots=True)
class DraftPlan:
    """Drafts of one model for some candidates, and what they add to a step."""

    candidates: Sequence[DraftCandidate]
    lengths: NDArray[np.intp]  # of each, 0 for no drafts
    is_text_first: NDArray[np.bool_]  # of each: the model is asked only where text has no guess
    rate: float = 0.0  # tokens per second of the whole step
    gain: float = 0.0  # tokens
    num_drafts: float = 0.0
    draft_seconds: float = 0.0

    @classmethod
    def empty(cls, candidates: Sequence[DraftCandidate]) -> "DraftPlan":
        num = len(candidates)
        return cls(candidates, np.zeros(num, np.intp), np.zeros(num, np.bool_))


def best_plan(
    step: DraftStep,
    costs: StepCosts,
    model: str,
    candidates: Sequence[DraftCandidate],
    slots: DraftSlots,
    need: NDArray[np.float64],
) -> DraftPlan:
    """The drafts of `model` that give `step` the most tokens per second.

    For each number of passes, (request, position) slots within it are taken in falling order of
    survival, and the best prefix wins. `need` [candidates]: how likely each has use for them.
    """
    best = DraftPlan.empty(candidates)
    for num_passes in range(1, int(slots.positions.max()) + 2):
        within = slots.within(num_passes)
        weights = need[within.rows]
        ends = np.arange(len(weights))
        if len(ends) > _MOST_PREFIXES:
            ends = np.linspace(0, len(weights) - 1, _MOST_PREFIXES).astype(np.intp)
        gains = np.cumsum(weights * within.survivals)[ends]
        num_drafts = np.cumsum(weights)[ends]
        in_pass = within.positions[:, None] == np.arange(num_passes)
        num_runs = np.cumsum(in_pass * weights[:, None], axis=0)[ends]  # [prefixes, passes]
        draft_seconds = costs.passes(model, num_runs).sum(axis=1)
        rates = step.rates(costs, step.gain + gains, step.num_drafts + num_drafts, draft_seconds)
        end = int(np.argmax(rates))
        if rates[end] > best.rate:
            best.lengths = within.lengths(int(ends[end]) + 1)
            best.rate, best.gain = float(rates[end]), float(gains[end])
            best.num_drafts = float(num_drafts[end])
            best.draft_seconds = float(draft_seconds[end])
    return best
