"""MeasuredEngine: an engine core whose steps are timed, by the device's clock and the host's."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nano.config import EngineConfig
from nano.engine.core import EngineCore
from nano.engine.messages import EngineRequest
from nano.gpu_check.clock import Clock
from nano.resolve import resolve
from nano.sampling_params import SamplingParams
from nano.speculation import RequestSpeculation
from nano.step import StepOutput, StepPlan
from nano.worker.executor import SingleProcessExecutor
from nano.worker.worker import Worker


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step, as it was executed."""

    num_tokens: int
    num_requests: int
    seconds: float  # of the device, from the first thing queued for it to the last
    gap_seconds: float  # of the device, from the end of the step before


class MeasuringExecutor(SingleProcessExecutor):
    """Marks where steps begin and end in the device's queue."""

    def __init__(self, config: EngineConfig, clock: Clock):
        super().__init__(config)
        self._clock = clock
        self._marks: list[tuple[StepPlan, Any, Any]] = []

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "not loaded, or closed"
        return self._worker

    def execute(self, plan: StepPlan) -> StepOutput:
        start = self._clock.mark()
        output = super().execute(plan)
        self._marks.append((plan, start, self._clock.mark()))
        return output

    def take_times(self) -> list[StepTimes]:
        """Of the steps since the last call; the first has no gap."""
        marks, self._marks = self._marks, []
        times = []
        for i, (plan, start, end) in enumerate(marks):
            gap = self._clock.seconds(marks[i - 1][2], start) if i else 0.0
            seconds = self._clock.seconds(start, end)
            times.append(StepTimes(plan.num_tokens, len(plan.num_scheduled_tokens), seconds, gap))
        return times


class MeasuredEngine:
    """The core, and the executor that measures it. Made by `measured_engine`."""

    def __init__(self, config: EngineConfig, executor: MeasuringExecutor):
        began = time.perf_counter()
        self.executor = executor
        self.core = EngineCore(config, executor)
        self.start_seconds = time.perf_counter() - began
        self._num_requests = 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        speculation: RequestSpeculation | None = None,
    ) -> list[StepTimes]:
        """Continue all prompts greedily at once, by so many tokens each."""
        self._add(prompts, num_tokens, speculation or RequestSpeculation())
        while self.core.has_work:
            self.core.step()
        return self.executor.take_times()

    def _add(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, speculation: RequestSpeculation
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
        for prompt in prompts:
            request_id = f"measured-{self._num_requests}"
            self._num_requests += 1
            request = EngineRequest(
                request_id, list(prompt), params, time.monotonic(), speculation=speculation
            )
            refusal = self.core.add(request)
            if refusal is not None:
                raise RuntimeError(f"a request of {len(prompt)} tokens: {refusal.error}")


@contextmanager
def measured_engine(model: Path, args: dict[str, Any], clock: Clock) -> Iterator[MeasuredEngine]:
    """An engine with arguments as `LLM` takes them. Raises `ConfigError` or `CheckpointError`."""
    config = resolve(EngineConfig.from_args({"model": str(model), **args}))
    engine = None
    try:
        engine = MeasuredEngine(config, MeasuringExecutor(config, clock))
        yield engine
    finally:
        if engine is not None:
            engine.core.close()
        del engine
        gc.collect()  # an engine has cycles, and the next one measures what is free
