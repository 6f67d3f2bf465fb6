"""ModelTrial: when a draft model is asked although it does not seem to pay. Rarely, and cheaply."""

import math
from dataclasses import dataclass

NUM_TRIAL_STEPS = 6  # of one draft each
NUM_SETTLING_STEPS = 2  # until their outcome is known
_TRIAL_SHARE = 0.004  # of all seconds may be spent on each model that does not pay
_FIRST_WAIT, _LONGEST_WAIT = 16, 4096  # steps from one trial to the next


@dataclass(slots=True)
class ModelTrial:
    """Of one model: some steps of one request, at intervals that double while it does not pay."""

    credit: float = math.inf  # seconds it may still cost; cut to those of one trial
    wait: int = _FIRST_WAIT
    num_until_next: int = _FIRST_WAIT
    request_id: str = ""  # being tried, "" for none
    num_steps_left: int = 0  # settling included

    def begin(self, request_id: str) -> None:
        self.request_id = request_id
        self.num_steps_left = NUM_TRIAL_STEPS + NUM_SETTLING_STEPS

    def end(self, *, pays: bool) -> None:
        self.wait = _FIRST_WAIT if pays else min(2 * self.wait, _LONGEST_WAIT)
        self.num_until_next = self.wait
        self.request_id = ""

    def earn(self, step_seconds: float, draft_seconds: float) -> None:
        """A step ran: a share of its time may go into trials, up to what the drafts of one cost."""
        most = NUM_TRIAL_STEPS * draft_seconds
        self.credit = min(self.credit + _TRIAL_SHARE * step_seconds, most)
