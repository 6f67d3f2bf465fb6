"""What a step takes besides its kernels: `python -m bench.host_overhead [--requests 1 32]`.

A model of 30 layers, so narrow that its kernels take little, decodes greedily at a context of about
128. An engine step is timed whole and in its phases; the kernels are then timed alone on the same
tensors, the calls of them not counted, and taken off what they are part of. What is left is Python,
torch's dispatcher and the compiled glue.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from bench.step_time import median, parts, timed
from nano.config import EngineConfig
from nano.engine.core import EngineCore
from nano.engine.messages import EngineRequest
from nano.layers.packed_weight import PackedWeight
from nano.resolve import resolve
from nano.sampling_params import SamplingParams
from nano.worker.executor import SingleProcessExecutor
from nano.worker.model_runner import ModelRunner
from tests.tiny import make_checkpoint

NUM_LAYERS = 30
CONTEXT = 128
NUM_STEPS = 200


class Phases:
    """Seconds of each call of some methods, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time `owner.method` under `name` from now on."""
        setattr(owner, method, self._timed(getattr(owner, method), name))

    def _timed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        times = self.seconds.setdefault(name, [])

        @wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = work(*args, **kwargs)
            times.append(time.perf_counter() - started)
            return result

        return timed


def measure(folder: str, num_requests: int) -> dict[str, float]:
    """Milliseconds of a decode step, by phase."""
    settings = {"model": folder, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 1024}
    config = resolve(EngineConfig.from_args(settings | {"startup": "compiled-first"}))
    executor = SingleProcessExecutor(config)
    core = EngineCore(config, executor)
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_STEPS + CONTEXT, ignore_eos=True, seed=0
    )
    for i in range(num_requests):
        prompt = [(i + j) % 250 for j in range(CONTEXT - NUM_STEPS // 2)]
        core.add(EngineRequest(str(i), prompt, params, arrival_time=float(i)))
    while core.step()[-1].request_id != str(num_requests - 1):
        pass  # until all prompts are computed
    runner = executor._worker.runner
    phases = Phases()
    phases.watch(core._scheduler, "schedule", "schedule")
    phases.watch(runner.states, "apply", "build batch")
    phases.watch(runner.batch_builder, "build", "build batch (rest)")
    phases.watch(runner, "model_forward", "forward")
    phases.watch(runner, "sample", "logits and sample")
    phases.watch(core._scheduler, "update_from_output", "update")
    phases.watch(core, "step", "whole step")
    for _ in range(NUM_STEPS):
        core.step()
    found = {name: median(times) * 1e3 for name, times in phases.seconds.items()}
    found["build batch"] += found.pop("build batch (rest)")
    kernels = own_milliseconds(runner, num_requests)
    found["forward"] -= kernels["linear"] + kernels["attention"]
    found["logits and sample"] -= kernels["lm_head"]
    found["kernels"] = sum(kernels.values())
    found["besides kernels"] = found["whole step"] - found["kernels"]
    core.close()
    return found


def own_milliseconds(runner: ModelRunner, num_rows: int) -> dict[str, float]:
    """Of the kernels by kind, without what calling them takes: that of calls with nothing to do."""
    weights = [module for module in runner.model.modules() if isinstance(module, PackedWeight)]
    nothing = {weight.num_inputs: torch.empty(0, weight.num_inputs) for weight in weights}
    with torch.inference_mode():
        calls = timed(lambda: [weight(nothing[weight.num_inputs]) for weight in weights], 50)
    call = calls / len(weights)
    num_calls = {"linear": len(weights) - 1, "lm_head": 1, "attention": NUM_LAYERS}
    found = parts(runner, num_rows, 50)
    return {name: (found[name] - num_calls[name] * call) * 1e3 for name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 8, 32])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, num_hidden_layers=NUM_LAYERS)
        columns = {number: measure(folder, number) for number in args.requests}
    print(f"| ms, {NUM_LAYERS} layers | " + " | ".join(f"{n} requests" for n in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for phase in next(iter(columns.values())):
        cells = [f"{found[phase]:.2f}" for found in columns.values()]
        print(f"| {phase} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
