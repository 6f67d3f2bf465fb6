"""Deadline: how much time a part of the check may still take, and what ends it when it does not."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_SECONDS = 10.0  # for what was begun in time


class TimeUp(BaseException):
    """Raised in a section that overran. No `Exception`: an engine would take it for its own."""


class Deadline:
    """Seconds that are left. Sections ask `has` before they begin something, and say what they
    left out; one that does not end by itself is ended."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._end = now() + seconds
        self._parent: Deadline | None = None
        self._is_armed = False
        self._grace = 0.0

    @property
    def left(self) -> float:
        return self._end - self._now()

    def has(self, seconds: float) -> bool:
        """Whether something that takes about so long may begin."""
        return self.left >= seconds

    def child(self, seconds: float) -> "Deadline":
        """A part that may take so long, and no longer than the whole."""
        part = Deadline(min(seconds, self.left), self._now)
        part._parent = self
        return part

    @contextmanager
    def enforced(self, grace: float = GRACE_SECONDS) -> Iterator[None]:
        """Raise `TimeUp` in the block `grace` seconds after the end. In the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def raise_time_up(signum: int, frame: FrameType | None) -> None:
            raise TimeUp(f"it overran its time by {grace:.0f} s")

        before = signal.signal(signal.SIGALRM, raise_time_up)
        self._is_armed, self._grace = True, grace
        self._arm()
        try:
            yield
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """What happens in the block takes none of the time."""
        signal_was_armed, self._is_armed = self._is_armed, False
        if signal_was_armed:
            signal.setitimer(signal.ITIMER_REAL, 0)
        began = self._now()
        try:
            yield
        finally:
            self._extend(self._now() - began)
            if signal_was_armed:
                self._is_armed = True
                self._arm()

    def _extend(self, seconds: float) -> None:
        self._end += seconds
        if self._parent is not None:
            self._parent._extend(seconds)

    def _arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, max(self.left + self._grace, 1e-3))
