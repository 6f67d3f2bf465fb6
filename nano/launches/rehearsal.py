"""Rehearsal: a worker, loaded as an engine loads it, runs made-up steps and is listened to."""

import dataclasses
from collections.abc import Callable

from nano.config import EngineConfig
from nano.device import Device, make_device
from nano.device.recording_graph import RecordingCpu
from nano.errors import ConfigError
from nano.launches.made_up_requests import MadeUpRequests
from nano.launches.operators import TracedOperators
from nano.launches.sequence import LaunchSequence, Step
from nano.launches.traced import listen
from nano.launches.traced_device import TracedDevice, as_device
from nano.resolve import resolve
from nano.step import StepPlan
from nano.worker.loaded_model import LoadedModel
from nano.worker.worker import Worker

_NUM_WARM_UPS = 2  # what is made on first use is made before anybody listens


class Rehearsal:
    """Owns a worker. `config` is not resolved; see `MadeUpRequests.sizes` for what it must hold."""

    def __init__(
        self, config: EngineConfig, num_requests: int, num_drafts: int, simulates_graphs: bool
    ):
        """Loads the model, captures all graphs. Raises `CheckpointError` or `ConfigError`."""
        self._num_requests, self._num_drafts = num_requests, num_drafts
        options = dataclasses.replace(config.compile, startup="compiled-first")
        if simulates_graphs:  # of the eager model: compiled C++ cannot be recorded
            options = dataclasses.replace(options, mode="eager")
        resolved = resolve(dataclasses.replace(config, compile=options))
        kind, num_threads = resolved.device.kind, resolved.device.num_threads
        if simulates_graphs and kind != "cpu":
            raise ConfigError(f"graphs are simulated on a CPU, and device={kind} has real ones")
        device: Device = (
            RecordingCpu(num_threads) if simulates_graphs else make_device(kind, num_threads)
        )
        self._sequence = LaunchSequence()
        self.worker = Worker(resolved, as_device(TracedDevice(device, self._sequence)))
        info = self.worker.load()
        listen(self.worker, device, info, self._sequence)
        assert resolved.model.max_model_len is not None
        self._requests = MadeUpRequests(
            info, num_requests, num_drafts, resolved.model.max_model_len
        )

    def run(self) -> list[Step]:
        """A step of decode, one of verification if there are drafts, one mixed with a prompt."""
        for _ in range(self._num_requests):
            self._execute(self._requests.admit())
        steps = [self._listen("decode", self._requests.decode)]
        if self._num_drafts:
            steps.append(self._listen("verify", self._requests.verify))
        steps.append(self._listen("mixed", self._requests.mix, num_warm_ups=0))
        self.worker.close()
        return steps

    def facts(self) -> dict[str, str]:
        """What the steps ran on, in words."""
        target, speculation = self.worker.target, self.worker.speculation
        facts = {
            "model": target.config.model.path,
            "layers": str(len(target.kv_layers)),
            "device": str(self.worker.device.torch_device),
            "attention": target.backend.name,
            "forward": target.forward.mode,
            "graphs": _graphs_of(target),
        }
        for name, loaded in zip(speculation.drafting, speculation.loaded):
            facts[f"graphs of {name}"] = _graphs_of(loaded)
        return facts

    def _listen(
        self, name: str, make_plan: Callable[[], StepPlan], num_warm_ups: int = _NUM_WARM_UPS
    ) -> Step:
        for _ in range(num_warm_ups):
            self._execute(make_plan())
        plan = make_plan()
        with self._sequence.listening() as launches, TracedOperators(self._sequence):
            self._execute(plan)
        return Step(name, len(plan.num_scheduled_tokens), plan.num_tokens, launches)

    def _execute(self, plan: StepPlan) -> None:
        self._requests.update(plan, self.worker.execute(plan))


def _graphs_of(loaded: LoadedModel) -> str:
    """What is captured, smallest first."""
    sizes: dict[str, list[str]] = {}
    for graphs in loaded.graphs:
        for key in reversed(graphs.captured):
            kind = f"full R x {key.query_len}, R" if key.is_full else "piecewise T, T"
            size = key.num_requests if key.is_full else key.num_tokens
            sizes.setdefault(kind, []).append(str(size))
    return "; ".join(f"{kind} = {' '.join(of_kind)}" for kind, of_kind in sizes.items()) or "none"
