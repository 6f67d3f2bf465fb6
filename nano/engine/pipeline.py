"""Pipeline: the plans that a core has made and whose outputs it has not taken yet. Torch-free."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

from nano.step import StepOutput, StepPlan

_Result = TypeVar("_Result")


class PlanExecutor(Protocol):
    """What runs a plan to its end."""

    def execute(self, plan: StepPlan) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class ExecutedPlan:
    plan: StepPlan
    output: StepOutput
    seconds: float  # that its execution took


class Pipeline:
    """Runs plans in order, at most `depth` of them at once between `submit` and `collect`.

    With a depth of 1 they run in the caller's thread, within `submit`. With more they run in a
    thread of their own, in which so everything must run that has to do with the executor (`call`):
    what it sets for a thread, it sets there.
    """

    def __init__(self, executor: PlanExecutor, depth: int):
        self._executor = executor
        self._depth = depth
        self._plans: deque[tuple[StepPlan, Future[tuple[StepOutput, float]]]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        if depth > 1:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")

    @property
    def overlaps(self) -> bool:
        """Whether the caller goes on while a plan is executed."""
        return self._thread is not None

    @property
    def num_in_flight(self) -> int:
        return len(self._plans)

    @property
    def is_full(self) -> bool:
        return len(self._plans) >= self._depth

    def submit(self, plan: StepPlan) -> None:
        assert not self.is_full, f"{self._depth} plans are in flight"
        self._plans.append((plan, self._run(lambda: self._execute(plan))))

    def collect(self) -> ExecutedPlan:
        """Wait for the oldest plan. Raises what its execution raised."""
        plan, done = self._plans.popleft()
        output, seconds = done.result()
        return ExecutedPlan(plan, output, seconds)

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Do something else of the executor's where it lives, behind the plans in flight."""
        return self._run(work).result()

    def close(self) -> None:
        """Call when nothing more will be submitted."""
        if self._thread is not None:
            self._thread.shutdown()

    def _execute(self, plan: StepPlan) -> tuple[StepOutput, float]:
        started = time.monotonic()
        output = self._executor.execute(plan)
        return output, time.monotonic() - started

    def _run(self, work: Callable[[], _Result]) -> "Future[_Result]":
        if self._thread is not None:
            return self._thread.submit(work)
        done: Future[_Result] = Future()
        done.set_result(work())  # what it raises is the caller's at once
        return done
