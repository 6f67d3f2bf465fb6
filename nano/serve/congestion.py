"""Congestion: whether the front end itself is what callers wait for."""

import asyncio
import time
from collections.abc import Callable

INTERVAL_SECONDS = 0.5  # in which a few hundred callers who come at once are let in


class Congestion:
    """Measures how long callers queue for the event loop, and whether that queue stands.

    The law is CoDel's (Nichols and Jacobson, "Controlling Queue Delay", 2012; RFC 8289): a queue
    that is long for a moment is good, a burst lies in it; one that has not been shorter than a
    target for a whole interval does nothing but delay. What is measured is the wait of a note that
    each caller leaves for the loop's next turn; every step of a call waits as long, and there are
    about ten of them. Unlike CoDel, which drops ever more of a flow that would slow down,
    `Admission` turns away all who would have to wait: they do not slow down, and those who wait for
    the engine bridge the gap.
    """

    def __init__(
        self,
        target: float,
        clock: Callable[[], float] = time.monotonic,
        call_soon: Callable[[Callable[[], None]], object] | None = None,
    ):
        """`target` in seconds. `call_soon` is that of the running event loop."""
        self._target = target
        self._clock = clock
        self._call_soon = call_soon
        self._asked: float | None = None  # when the note that is not yet read was left
        self._heard = -1.0  # when the last one was read
        self._wait = 0.0  # of that one
        self._long_since: float | None = None  # since when none has waited less than the target

    def measure(self) -> None:
        """A caller has come."""
        if self._asked is None:
            self._asked = self._clock()
            call_soon = self._call_soon or asyncio.get_running_loop().call_soon
            call_soon(self._hear)

    @property
    def is_standing(self) -> bool:
        now, since = self._clock(), self._long_since
        return since is not None and self._is_recent(now) and now - since >= INTERVAL_SECONDS

    def _hear(self) -> None:
        assert self._asked is not None
        now, asked, self._asked = self._clock(), self._asked, None
        wait = now - asked
        if wait <= self._target:
            self._long_since = None
        elif self._long_since is None or not self._is_recent(asked):
            self._long_since = now  # a single wait, however long, makes no queue
        self._heard, self._wait = now, wait

    def _is_recent(self, now: float) -> bool:
        """Whether the last wait says something about `now`: turns as long may lie between."""
        return now - self._heard <= INTERVAL_SECONDS + self._wait
