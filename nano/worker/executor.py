"""Executor: how the engine core reaches its workers."""

from abc import ABC, abstractmethod

from nano.config import EngineConfig
from nano.step import StepOutput, StepPlan
from nano.worker.worker import Worker, WorkerInfo


class Executor(ABC):
    """Runs plans on one or more workers; every worker gets the same plan."""

    @abstractmethod
    def load(self) -> WorkerInfo:
        """Load the model and settle the sizes. Called once, first."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step to its end."""

    @abstractmethod
    def idle(self) -> None:
        """Nothing is to be executed now: a moment for work on the side."""

    @abstractmethod
    def close(self) -> None:
        """Let go of workers and memory. Safe to call twice."""


class SingleProcessExecutor(Executor):
    """One worker, in this process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker: Worker | None = None

    def load(self) -> WorkerInfo:
        self._worker = Worker(self._config)
        return self._worker.load()

    def execute(self, plan: StepPlan) -> StepOutput:
        assert self._worker is not None, "the executor is not loaded, or closed"
        return self._worker.execute(plan)

    def idle(self) -> None:
        if self._worker is not None:
            self._worker.idle()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def make_executor(config: EngineConfig) -> Executor:
    """The executor that `config` asks for."""
    return SingleProcessExecutor(config)
