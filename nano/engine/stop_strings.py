"""StopChecker: finds stop strings in text that arrives in pieces. Torch-free."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was completed; `text` is the last text to show."""

    stop: str
    text: str


class StopChecker:
    """Holds back text that may become a stop string, and cuts where one is complete.

        fed:   "The quick br" "own fo"     "x jum"
        sent:  "The quick br" ""           ""         <- "own fo" is held for the stop "own fox"
        match:                             "own fox"

    Of several matches in one piece the one that starts first wins, then the shortest. Held text
    is the longest suffix of what was fed that is a proper prefix of a stop string, so nothing of a
    match is ever sent, and nothing else is delayed.
    """

    def __init__(self, stop: Sequence[str], include_stop_string: bool = False):
        self._stop = tuple(sorted(set(stop), key=len))
        self._include_stop_string = include_stop_string
        self._held = ""
        first_chars = {re.escape(text[0]) for text in self._stop}
        self._find_start = re.compile("|".join(first_chars)).search

    def feed(self, text: str, may_stop: bool = True) -> str | StopMatch:
        """Take one token's text; returns what may be sent now, or the match it completed.

        A match that completes while `may_stop` is false is text like any other.
        """
        if not self._held and not self._find_start(text):
            return text  # nearly every token
        num_seen = len(self._held)
        pending = self._held + text
        if may_stop:
            match = self._first_match(pending, num_seen)
            if match is not None:
                return match
        num_held = max(_overlap(pending, stop) for stop in self._stop)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def flush(self) -> str:
        """The held text, when nothing more will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, pending: str, num_seen: int) -> StopMatch | None:
        """The match that ends after the first `num_seen` characters and starts earliest."""
        first, first_start = None, len(pending)
        for stop in self._stop:  # shortest first
            start = pending.find(stop, max(0, num_seen - len(stop) + 1))
            if 0 <= start < first_start:
                first, first_start = stop, start
        if first is None:
            return None
        end = first_start + len(first) if self._include_stop_string else first_start
        return StopMatch(first, pending[:end])


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
