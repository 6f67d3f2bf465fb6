"""Watchdog: tells from a core's heartbeats whether it is stuck."""

from nano.engine.messages import EngineHeartbeat

LOOK_SECONDS = 0.2  # between two looks
SILENCE_LIMIT_SECONDS = 5.0
STEP_LIMIT_SECONDS = 30.0  # or STEP_LIMIT_FACTOR predicted steps, if that is longer
STEP_LIMIT_FACTOR = 20


class Watchdog:
    """Is told of every heartbeat, and looks every `LOOK_SECONDS`.

    Only time spent watching counts: while this process itself was stopped (a debugger, Ctrl-Z, a
    suspended machine) it cannot know what the core did.
    """

    def __init__(self, now: float):
        self._last_look = now
        self._silence = 0.0
        self._step_started: float | None = None
        self._step_seconds = 0.0
        self._step_limit = STEP_LIMIT_SECONDS

    def heard(self, beat: EngineHeartbeat) -> None:
        self._silence = 0.0
        if beat.step_started != self._step_started:
            self._step_started = beat.step_started
            self._step_seconds = 0.0
        self._step_limit = max(STEP_LIMIT_SECONDS, STEP_LIMIT_FACTOR * beat.predicted_step_seconds)

    def look(self, now: float) -> str | None:
        """What is wrong with the core at time `now`, in words, or None."""
        watched = min(now - self._last_look, 5 * LOOK_SECONDS)
        self._last_look = now
        self._silence += watched
        if self._silence > SILENCE_LIMIT_SECONDS:
            return f"no heartbeat for {SILENCE_LIMIT_SECONDS:g} s"
        if self._step_started is not None:
            self._step_seconds += watched
            if self._step_seconds > self._step_limit:
                return f"one step has taken more than {self._step_limit:g} s"
        return None
