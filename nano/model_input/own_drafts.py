"""OwnDrafts: the drafts that a worker made and keeps, for a plan that was made before them.

Those of a model lie on the device. A core that plans ahead is told how many there are
(DRAFT_ON_DEVICE), and nobody waits for them before the step that verifies them has been queued. One
that plans step by step is told which they are, and has to wait.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from nano.model_input.device_drafts import DeviceDrafts
from nano.step import DRAFT_ON_DEVICE, StepPlan

DraftIds = list[int] | DeviceDrafts  # of one request


@dataclass(slots=True)
class FilledPlan:
    """A plan with what its worker knows. Dicts are by request."""

    plan: StepPlan  # has as many drafts as there are; DRAFT_ON_DEVICE stands for the unread
    unread: dict[str, DeviceDrafts] = field(default_factory=dict)
    verified: dict[str, list[int]] = field(default_factory=dict)  # see `StepOutput`; all once read
    unverified: dict[str, DraftIds] = field(default_factory=dict)  # of those who verify none


class OwnDrafts:
    """Of each request those made after its last step, until the next one or until it ends."""

    def __init__(self, *, shows_all: bool = True) -> None:
        """shows_all: the core is told the ids of all drafts."""
        self._shows_all = shows_all
        self._drafts: dict[str, DraftIds] = {}
        self._seconds_waited = 0.0

    def keep(self, request_ids: Sequence[str], drafts: Sequence[DraftIds]) -> list[list[int]]:
        """What was proposed after a step: parallel lists. Returns what the core is told of it."""
        shown = []
        for request_id, made in zip(request_ids, drafts):
            if not isinstance(made, list):
                made = self._read(made) if self._shows_all else made
            if made:
                self._drafts[request_id] = made
            else:
                self._drafts.pop(request_id, None)
            shown.append(made if isinstance(made, list) else [DRAFT_ON_DEVICE] * len(made))
        return shown

    def fill_in(self, plan: StepPlan) -> FilledPlan:
        """The plan with drafts in place of DRAFT_ON_DEVICE, as many as there are.

        `plan` itself, which its maker may still look at, stays as it is.
        """
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            self._drafts.pop(request_id, None)
        filled = FilledPlan(plan)
        num_asked = {
            request_id: len(asked)
            for request_id, asked in plan.draft_token_ids.items()
            if asked[0] == DRAFT_ON_DEVICE
        }
        if num_asked:
            self._fill_in(filled, num_asked)
        if self._drafts:
            of_plan = filled.plan
            filled.unverified = {
                request_id: made
                for request_id, made in self._drafts.items()
                if request_id in of_plan.num_scheduled_tokens
                and request_id not in of_plan.draft_token_ids
            }
        return filled

    def _fill_in(self, filled: FilledPlan, num_asked: dict[str, int]) -> None:
        num_scheduled = dict(filled.plan.num_scheduled_tokens)
        drafts = dict(filled.plan.draft_token_ids)
        for request_id, most in num_asked.items():
            made = self._drafts.get(request_id, [])
            made = made[:most] if isinstance(made, list) else made.first(most)
            num_scheduled[request_id] -= most - len(made)
            if isinstance(made, list):
                filled.verified[request_id] = drafts[request_id] = made
            else:
                filled.unread[request_id] = made
                drafts[request_id] = [DRAFT_ON_DEVICE] * len(made)
            if not made:
                del drafts[request_id]
        filled.plan = dataclasses.replace(
            filled.plan, num_scheduled_tokens=num_scheduled, draft_token_ids=drafts
        )

    def read(self, filled: FilledPlan) -> dict[str, int]:
        """Wait for the unread of a step that has been queued, and complete `filled.verified`.

        Returns the first draft of each request that verifies none of those it had.
        """
        started = time.perf_counter()
        for request_id, made in filled.unread.items():
            filled.verified[request_id] = made.read_as_verified()
        if filled.unread:
            self._seconds_waited += time.perf_counter() - started
        firsts = {}
        for request_id, drafts in filled.unverified.items():
            token_ids = drafts if isinstance(drafts, list) else self._read(drafts.first(1))
            if token_ids:
                firsts[request_id] = token_ids[0]
        return firsts

    def take_seconds_waited(self) -> float:
        """For models to make their drafts, since the last call."""
        seconds, self._seconds_waited = self._seconds_waited, 0.0
        return seconds

    def _read(self, made: DeviceDrafts) -> list[int]:
        started = time.perf_counter()
        token_ids = made.read()
        self._seconds_waited += time.perf_counter() - started
        return token_ids
