"""Admission: how many requests may wait, how long they may, and when to come back instead."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, islice

from nano.engine.input_processor import PreparedRequest
from nano.engine.messages import EngineReady
from nano.engine.timeline import Timeline
from nano.errors import InvalidRequest
from nano.outputs import FinishReason, RequestOutput
from nano.serve.congestion import Congestion
from nano.serve.http.errors import Refusal
from nano.serve.options import ServerOptions

WAITING_REQUESTS_FACTOR = 16  # requests that may wait by default, for each that may run
DRAIN_WINDOW_SECONDS = 30.0
MAX_RETRY_SECONDS = 60


class DrainRate:
    """How fast requests and their prompt tokens have lately been leaving the queue."""

    def __init__(self, now: float):
        self._since = now
        self._left: deque[tuple[float, int]] = deque()  # when, and its tokens
        self._num_tokens = 0

    def restart(self, now: float) -> None:
        """The queue was empty until now: nothing could leave it."""
        self._since = now
        self._left.clear()
        self._num_tokens = 0

    def note(self, num_tokens: int, now: float) -> None:
        """A request with a prompt of `num_tokens` has left."""
        self._left.append((now, num_tokens))
        self._num_tokens += num_tokens
        self._forget(now)

    def seconds(self, num_requests: int, num_tokens: int, now: float) -> float:
        """How long so many will take to leave, both the requests and the tokens."""
        self._forget(now)
        elapsed = max(1.0, now - max(self._since, now - DRAIN_WINDOW_SECONDS))
        if not self._left:
            return elapsed  # nobody has left for so long: it may take as long again
        share = max(num_requests / len(self._left), num_tokens / max(1, self._num_tokens))
        return elapsed * share

    def _forget(self, now: float) -> None:
        while self._left and self._left[0][0] <= now - DRAIN_WINDOW_SECONDS:
            self._num_tokens -= self._left.popleft()[1]


class Arrival:
    """A call that is being read and tokenised. Until `end`, which may come twice, it waits as one
    request: or more would be let in than may wait, and turned away after all that work.
    """

    def __init__(self, arrivals: set["Arrival"]):
        self._arrivals = arrivals
        arrivals.add(self)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._arrivals.discard(self)


class Admission:
    """The limits of one front end. It is a `RequestObserver`, and so knows who waits.

    Waiting are the calls on their way to the core, and the requests that were sent to it and of
    which no step has computed anything, except for as many as there are free places among the
    running ones: those begin at once. Each of several front ends keeps its own share of the limits
    and the places. That takes no question to anybody; the price is that one may refuse while
    another still has room.
    """

    def __init__(
        self,
        ready: EngineReady,
        options: ServerOptions,
        count_rejection: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        congestion: Congestion | None = None,
    ):
        """`count_rejection` is called with the reason of each refusal."""
        max_waiting = options.max_waiting_requests
        if max_waiting is None:
            max_waiting = WAITING_REQUESTS_FACTOR * ready.max_num_requests
        num_shares = options.api_server_count
        max_tokens = options.max_waiting_tokens
        self._max_requests = math.ceil(max_waiting / num_shares)
        self._max_tokens = None if max_tokens is None else math.ceil(max_tokens / num_shares)
        self._max_running = math.ceil(ready.max_num_requests / num_shares)
        self._timeout_ms = options.timeout_ms
        self._max_queue_ms = options.max_queue_ms
        target = math.inf if options.max_lag_ms is None else options.max_lag_ms / 1000
        self._congestion = congestion or Congestion(target, clock)
        self._count_rejection = count_rejection
        self._clock = clock
        self._arrivals: set[Arrival] = set()
        self._waiting: dict[Timeline, None] = {}  # in order of arrival
        self._num_waiting_tokens = 0
        self._num_running = 0
        self._drain = DrainRate(clock())

    def meet(self) -> None:
        """A caller is at the door. Raises `Refusal` if not one more request may wait, or if this
        process is behind with what it has let in: then nobody may, but places are filled.
        """
        self._congestion.measure()
        if self._congestion.is_standing and self._num_waiting(1) > 0:
            raise self._refusal("front_end", "the server is busy with other requests", "overloaded")
        self.check([0])

    def arrive(self) -> Arrival:
        """A call is on its way, whose body has come. Raises `Refusal`."""
        self.check([0])
        return Arrival(self._arrivals)

    def check(self, num_prompt_tokens: Sequence[int]) -> None:
        """Whether a call of requests with prompts so long may enter. Raises what turns it away."""
        num_requests = len(num_prompt_tokens)
        if num_requests > self._max_running + self._max_requests:
            raise InvalidRequest(
                f"one call may bring at most {self._max_running + self._max_requests} requests, "
                f"as many as run and wait at once, got {num_requests}",
                "n",
            )
        num_waiting = self._num_waiting(num_requests)
        if num_waiting > self._max_requests:
            limit = f"at most {self._max_requests} requests may wait, and this call makes it "
            raise self._refusal("waiting_requests", limit + str(num_waiting))
        if self._max_tokens is not None:
            waiting = (timeline.num_prompt_tokens for timeline in self._waiting)
            starting = islice(chain(waiting, num_prompt_tokens), self._num_free)
            num_tokens = self._num_waiting_tokens + sum(num_prompt_tokens) - sum(starting)
            if num_tokens > self._max_tokens:
                limit = f"at most {self._max_tokens} prompt tokens may wait, and this call makes it"
                raise self._refusal("waiting_tokens", f"{limit} {num_tokens}")

    @property
    def _num_free(self) -> int:
        """Places among the running requests."""
        return max(0, self._max_running - self._num_running)

    def _num_waiting(self, num_more: int) -> int:
        """How many requests wait once so many more have come; below zero, places are left."""
        return len(self._waiting) + len(self._arrivals) + num_more - self._num_free

    def limit(
        self,
        prepared: Sequence[PreparedRequest],
        timeout_ms: float | None,
        max_queue_ms: float | None,
    ) -> None:
        """Give requests their deadlines: the caller's wish or the server's limit, the lower one."""
        timeout = _lower(timeout_ms, self._timeout_ms)
        max_queue = _lower(max_queue_ms, self._max_queue_ms)
        for request in prepared:
            for child in request.children:
                child.deadline = _after(child.arrival_time, timeout)
                child.queue_deadline = _after(child.arrival_time, max_queue)

    def lateness(self, output: RequestOutput) -> Refusal | None:
        """What to tell the caller if one of the request's deadlines has ended it."""
        reasons = {completion.finish_reason for completion in output.outputs}
        if FinishReason.QUEUE_TIMEOUT in reasons:
            message = f"the request has not begun within its max_queue_ms{_age(output)}"
            return self._refusal("queue_timeout", message, "queue_timeout")
        if FinishReason.TIMEOUT in reasons:
            message = f"the request has not ended within its timeout_ms{_age(output)}"
            return Refusal(408, message, code="timeout")
        return None

    def entered(self, timeline: Timeline) -> None:
        if not self._waiting:
            self._drain.restart(self._clock())
        self._waiting[timeline] = None
        self._num_waiting_tokens += timeline.num_prompt_tokens

    def begun(self, timeline: Timeline) -> None:
        self._leave(timeline)
        self._num_running += 1

    def advanced(self, timeline: Timeline, num_tokens: int, seconds: float) -> None:
        pass

    def ended(self, timeline: Timeline) -> None:
        if timeline in self._waiting:
            self._leave(timeline)
        else:
            self._num_running -= 1

    def _leave(self, timeline: Timeline) -> None:
        del self._waiting[timeline]
        self._num_waiting_tokens -= timeline.num_prompt_tokens
        self._drain.note(timeline.num_prompt_tokens, self._clock())

    def _refusal(self, reason: str, message: str, code: str = "queue_full") -> Refusal:
        """429, to be tried again once those who wait now have begun, as fast as they lately did."""
        self._count_rejection(reason)
        seconds = self._drain.seconds(len(self._waiting), self._num_waiting_tokens, self._clock())
        retry_after = min(max(1, math.ceil(seconds)), MAX_RETRY_SECONDS)
        message = f"{message}; try again in {retry_after} s"
        return Refusal(429, message, code=code, headers={"Retry-After": str(retry_after)})


def _age(output: RequestOutput) -> str:
    metrics = output.metrics
    if metrics is None or metrics.finished_time is None:
        return ""
    milliseconds = 1000 * (metrics.finished_time - metrics.arrival_time)
    return f", or the server's: it ended after {milliseconds:.0f} ms"


def _lower(wish: float | None, limit: float | None) -> float | None:
    given = [milliseconds for milliseconds in (wish, limit) if milliseconds is not None]
    return min(given, default=None)


def _after(arrival_time: float, milliseconds: float | None) -> float | None:
    return None if milliseconds is None else arrival_time + milliseconds / 1000
