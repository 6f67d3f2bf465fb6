"""How long steps take: `StepCosts` predicts it, `SpeculationGuard` compares what was measured.

Both learn from the seconds they are told in a `StepTiming`; neither reads a clock.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nano.speculation import ProposerInfo

_READ_AT_ONCE = 64  # tokens, and a pass takes its least time per token
_FAR_TOKENS = 1 << 16  # no step is larger
_GAIN = 0.1  # of a surprise is learned
_SHARED = (
    0.6  # of that at all sizes (a longer context, a busy machine), the rest near the size seen
)
_UNMEASURED_PASS = 0.25  # of a step of one token, for a draft model that tells nothing
_TOLERANCE = 3.0  # surprises beyond this many times the usual one are cut to it
_FIRST_SURPRISE, _LEAST_SURPRISE = 1.0, 0.02  # usual ones, of a logarithm

_MOST_ON_STEPS, _LEAST_ON_STEPS = 64, 3  # that are compared
_NUM_OFF_STEPS = 3
# Steps with drafts before a comparison: the first, one after the load has changed, and in between
# as many as keep what looks cost, which is what drafts gain, within a share of all seconds.
_FIRST_CHECK, _CHECK_OF_NEW_LOAD, _LONGEST_CHECK = 6, 24, 4096
_LOOK_SHARE = 0.003
# Steps of a pause, and how that grows from one to the next.
_FIRST_PAUSE, _PAUSE_GROWTH, _LONGEST_PAUSE = 96, 4, 1 << 16
_ADVANTAGE = 1.02  # of no drafts over drafts that ends them


class StepTime:
    """Seconds of a step as a function of its tokens.

    A line through measured points, never falling, continued as its last piece goes; beyond a
    single point it is flat, which is soon corrected because nothing keeps drafts from trying.
    What steps take then bends it: logarithms of measured over predicted, averaged exponentially.

    points  (tokens, seconds), at least one, increasing in tokens, seconds above 0
    """

    def __init__(self, points: Sequence[tuple[int, float]]):
        assert points, "a step-time model needs at least one measured point"
        tokens = [float(num_tokens) for num_tokens, _ in points]
        seconds = np.maximum.accumulate([seconds for _, seconds in points]).tolist()
        assert tokens == sorted(set(tokens)), f"points must increase in tokens, got {points}"
        assert seconds[0] > 0, f"a step takes more than 0 seconds, got {points}"
        slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2]) if len(tokens) > 1 else 0.0
        while tokens[-1] < _FAR_TOKENS:  # knots that can be bent later
            seconds.append(seconds[-1] + slope * tokens[-1])
            tokens.append(2 * tokens[-1])
        self._tokens = np.array(tokens)
        self._log_seconds = np.log(seconds)
        self._seconds = np.array(seconds)
        self._usual_surprise = _FIRST_SURPRISE
        self._num_observed = 0

    def seconds(self, num_tokens: float | NDArray[Any]) -> NDArray[np.float64]:
        """Predicted, of steps with `num_tokens` each: float64 of the same shape."""
        return np.asarray(np.interp(np.asarray(num_tokens), self._tokens, self._seconds))

    def observe(self, num_tokens: float, seconds: float) -> None:
        """A step of `num_tokens` took `seconds`."""
        if num_tokens <= 0 or seconds <= 0:
            return
        surprise = math.log(seconds / float(self.seconds(num_tokens)))
        # One step may be ten times slower because of somebody else: it must not count as ten. When
        # they all are, the usual surprise grows by a fifth with each and lets them through.
        limit = _TOLERANCE * self._usual_surprise
        surprise = min(max(surprise, -limit), limit)
        usual = self._usual_surprise + 0.1 * (abs(surprise) - self._usual_surprise)
        self._usual_surprise = max(usual, _LEAST_SURPRISE)
        self._num_observed += 1
        gain = max(_GAIN, 1 / self._num_observed)

        num_tokens = min(max(num_tokens, self._tokens[0]), self._tokens[-1])
        right = max(1, int(np.searchsorted(self._tokens, num_tokens)))
        left = right - 1
        share = (num_tokens - self._tokens[left]) / (self._tokens[right] - self._tokens[left])
        self._log_seconds += gain * _SHARED * surprise
        self._log_seconds[left] += gain * (1 - _SHARED) * surprise * (1 - share)
        self._log_seconds[right] += gain * (1 - _SHARED) * surprise * share
        self._seconds = np.maximum.accumulate(np.exp(self._log_seconds))


class StepLoad(NamedTuple):
    """What a step has to do without drafts."""

    num_tokens: int
    num_outputs: int  # requests that sample in it, of a token each if there are no prompts


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one step took, in seconds."""

    num_tokens: int  # computed by the target, drafts included
    target_seconds: float  # forward, logits and sampling of the target
    draft_seconds: float  # of proposers that run a model
    num_draft_passes: int
    num_draft_pass_tokens: int
    other_seconds: float  # the rest of the step: planning, building, updating
    is_catching_up: bool = False  # a draft model read what had been known for longer than a step

    @property
    def seconds(self) -> float:
        return self.target_seconds + self.draft_seconds + self.other_seconds


class StepCosts:
    """All that a step's seconds are made of: the target, passes of draft models, the rest.

    A pass of a draft model is taken to bend where a step of the target does, being the same kind of
    work on the same machine. A longer context is carried by what all sizes share.
    """

    def __init__(
        self, proposers: Sequence[ProposerInfo], step_seconds: Sequence[tuple[int, float]]
    ):
        self.target = StepTime(step_seconds)
        one = float(self.target.seconds(1))
        self._passes = {
            info.name: StepTime(
                [
                    (num_tokens, seconds / one * (info.pass_seconds or _UNMEASURED_PASS * one))
                    for num_tokens, seconds in step_seconds
                ]
            )
            for info in proposers
            if not info.is_free
        }
        self.other_seconds = 0.0

    def step(self, load: StepLoad, num_drafts: float | NDArray[Any]) -> NDArray[np.float64]:
        """Of a step with `num_drafts` drafts beside `load`, without making drafts.

        Less what it owes to prompts: what is left is for the requests that sample.
        """
        seconds = self.target.seconds
        prompts = seconds(load.num_tokens) - seconds(load.num_outputs)
        return seconds(load.num_tokens + num_drafts) - prompts + self.other_seconds

    def passes(self, proposer: str, num_requests: float | NDArray[Any]) -> NDArray[np.float64]:
        """Of passes of a model for `num_requests` each; less than 1 is the chance to be needed."""
        needed = np.minimum(num_requests, 1.0)
        return needed * self._passes[proposer].seconds(np.maximum(num_requests, 1.0))

    def reading(self, proposer: str, num_tokens: int) -> float:
        """Of a model with KV of its own, to read so many tokens of a request."""
        at_once = min(num_tokens, _READ_AT_ONCE)
        return num_tokens / at_once * float(self._passes[proposer].seconds(at_once))

    def observe(self, timing: StepTiming, num_passes: Mapping[str, int]) -> dict[str, float]:
        """Learn from a step in which models were to run `num_passes` each: its seconds of each.

        Only their sum was measured. It is divided as expected.
        """
        self.target.observe(timing.num_tokens, timing.target_seconds)
        other = timing.other_seconds
        if self.other_seconds:
            other = min(other, _TOLERANCE * self.other_seconds)
            other = self.other_seconds + _GAIN * (other - self.other_seconds)
        self.other_seconds = other
        if not timing.num_draft_passes or not num_passes:
            return {}
        if timing.is_catching_up:  # which is done once, and tells nothing of other passes
            return dict.fromkeys(num_passes, timing.draft_seconds / len(num_passes))
        num_runs = timing.num_draft_pass_tokens / timing.num_draft_passes
        expected = {
            name: number * float(self._passes[name].seconds(num_runs))
            for name, number in num_passes.items()
        }
        share = timing.draft_seconds / sum(expected.values())
        # Models that had less to do than asked, because text had guesses, are not quicker for it.
        per_pass = share * sum(num_passes.values()) / timing.num_draft_passes
        for name, number in num_passes.items():
            self._passes[name].observe(num_runs, per_pass * expected[name] / number)
        return {name: share * seconds for name, seconds in expected.items()}


class _GuardState(Enum):
    ON = "drafts, and a look at no drafts when it is time"
    LOOK = "a few steps without drafts"
    PAUSE = "no drafts"
    RETRY = "drafts again, to be compared with the pause"


class SpeculationGuard:
    """Pauses drafts that lose, whatever a model of their cost says.

    Compares tokens per second and request of steps with drafts with those of a few steps without,
    at about the same number of requests. Looks the more rarely the more drafts win; pauses, each
    longer than the one before, while they lose. Steps with prompts compare with none.
    """

    def __init__(self) -> None:
        self._state = _GuardState.ON
        self._on: deque[tuple[float, float]] = deque(maxlen=_MOST_ON_STEPS)  # tokens, seconds
        self._off: deque[float] = deque(maxlen=_NUM_OFF_STEPS)  # seconds of a token
        self._num_requests = 0  # of the steps in both, about
        self._num_until_look = self._check = _FIRST_CHECK
        self._num_until_retry = self._num_to_skip = 0
        self._pause = _FIRST_PAUSE
        self.num_steps_off = 0  # because of it

    @property
    def lets_draft(self) -> bool:
        return self._state in (_GuardState.ON, _GuardState.RETRY)

    def observe_prompts(self) -> None:
        """A step had prompts in it."""
        if self._state is _GuardState.LOOK:  # it would last as long as there are prompts
            self._look_later()
        elif self._state is _GuardState.PAUSE:
            self._wait()

    def observe(
        self, num_requests: int, num_new_tokens: int, seconds: float, *, has_drafts: bool
    ) -> None:
        """A step of `num_requests` decoding requests and nothing else, and the tokens it gave.

        has_drafts  it verified some, or a model made some: that is half of the cost
        """
        if num_requests < 1 or seconds <= 0:
            return
        self._forget_other_loads(num_requests)
        if not has_drafts:
            self._off.append(seconds)
        elif self._num_to_skip:
            self._num_to_skip -= 1
        else:
            self._on.append((num_new_tokens / num_requests, seconds))
        if self._state is _GuardState.PAUSE:
            self._wait()
        elif self._state is _GuardState.LOOK:
            self.num_steps_off += 1
            if len(self._off) == _NUM_OFF_STEPS:
                self._judge()
        elif self._state is _GuardState.RETRY:
            # Bad steps may be long ones, so it does not wait for all of them.
            num_steps = len(self._on)
            if num_steps == _MOST_ON_STEPS or (
                num_steps >= _LEAST_ON_STEPS and self._gain() * _ADVANTAGE < 1
            ):
                self._judge()
        elif has_drafts:
            self._num_until_look -= 1
            if self._num_until_look <= 0 and len(self._on) >= _LEAST_ON_STEPS:
                self._state = _GuardState.LOOK
                self._off.clear()

    def _wait(self) -> None:
        self.num_steps_off += 1
        self._num_until_retry -= 1
        if self._num_until_retry <= 0:
            self._state = _GuardState.RETRY
            self._on.clear()
            self._num_to_skip = 1  # drafts are made in one step and verified in the next

    def _look_later(self) -> None:
        self._state = _GuardState.ON
        self._num_until_look = self._check

    def _forget_other_loads(self, num_requests: int) -> None:
        before = self._num_requests
        if 4 * abs(num_requests - before) <= before:
            return
        # What loses at 32 requests may win at one, but hardly at 30.
        is_near = before < 2 * num_requests < 4 * before
        if self._state is _GuardState.PAUSE and is_near:
            return
        self._state = _GuardState.ON
        self._num_until_look = min(self._num_until_look, _CHECK_OF_NEW_LOAD)
        self._num_requests = num_requests
        self._on.clear()
        self._off.clear()

    def _judge(self) -> None:
        gain = self._gain()
        if gain * _ADVANTAGE < 1:
            self._state = _GuardState.PAUSE
            self._num_until_retry = self._pause
            self._pause = min(_PAUSE_GROWTH * self._pause, _LONGEST_PAUSE)
            return
        self._pause = _FIRST_PAUSE
        num_steps = int(_NUM_OFF_STEPS * (gain - 1) / _LOOK_SHARE)
        self._check = min(max(num_steps, _FIRST_CHECK), _LONGEST_CHECK)
        self._look_later()

    def _gain(self) -> float:
        """Tokens per second with drafts, at the upper end of chance, over those without."""
        tokens, seconds = zip(*self._on)
        longest = _TOLERANCE * median(seconds)
        on_seconds = fmean(min(one, longest) for one in seconds)
        error = 2 * stdev(tokens) / math.sqrt(len(tokens))
        return float((fmean(tokens) + error) / on_seconds * median(self._off))
