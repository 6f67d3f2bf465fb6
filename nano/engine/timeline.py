"""Timeline: what one completion has been through, for those who count and measure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nano.outputs import FinishReason, TokenOutput


class RequestObserver(Protocol):
    """Hears of each completion that the front end asks the core for, as it goes its way."""

    def entered(self, timeline: "Timeline") -> None:
        """It is about to be sent to the core."""

    def begun(self, timeline: "Timeline") -> None:
        """A first step has computed some of it. Not called if it ends before."""

    def advanced(self, timeline: "Timeline", num_tokens: int, seconds: float) -> None:
        """It has `num_tokens` more, `seconds` after the ones before, or after its arrival."""

    def ended(self, timeline: "Timeline") -> None:
        """It is over, for whatever reason. Called once for each that entered, as the last."""


@dataclass(slots=True, eq=False)
class Timeline:
    """Times are time.monotonic() seconds."""

    num_prompt_tokens: int
    max_tokens: int | None
    arrival_time: float
    begun_time: float | None = None  # start of the first step that computed some of it
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0  # of the prompt
    num_tokens: int = 0  # of output
    finish_reason: FinishReason | None = None

    def note(
        self,
        output: TokenOutput,
        num_tokens: int,
        now: float,
        observers: Sequence[RequestObserver],
    ) -> None:
        """Take in the core's news, of which `num_tokens` tokens count, and pass them on."""
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.first_scheduled_time is not None:
            self.begun_time = output.first_scheduled_time
            for observer in observers:
                observer.begun(self)
        if not num_tokens:
            return
        self.num_tokens += num_tokens
        last, self.last_token_time = self.last_token_time, now
        if last is None:
            self.first_token_time, last = now, self.arrival_time
        for observer in observers:
            observer.advanced(self, num_tokens, now - last)
