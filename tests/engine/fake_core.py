"""A core with a worker made of arithmetic: the next token is the last one plus one.

Run as `python -m tests.engine.fake_core` in place of `nano.engine.process`, it is also the child
process of the client's tests. Some first tokens of a prompt are faults.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from nano.config import EngineConfig, ModelOptions, SchedulerOptions
from nano.engine import process
from nano.engine.core import EngineCore
from nano.engine.messages import EngineRequest
from nano.errors import CheckpointError
from nano.kv_spec import KVCacheConfig
from nano.sampling_params import SamplingParams
from nano.speculation import ProposerInfo
from nano.step import StepOutput, StepPlan

VOCAB_SIZE = 1000
RAISE_TOKEN = 901  # the step raises
FAIL_TOKEN = 902  # the step answers that this request failed
SLOW_TOKEN = 903  # the step takes SLOW_SECONDS
EXIT_TOKEN = 904  # the process is gone
SLOW_SECONDS = 0.05


@dataclass
class FakeInfo:
    kv_cache: KVCacheConfig
    token_budget: int = 64
    max_num_requests: int = 4
    num_lookahead_tokens: int = 0
    costly_context: int | None = None
    proposers: tuple[ProposerInfo, ...] = ()
    verification_seconds: tuple[tuple[int, float], ...] = ((1, 0.01),)
    step_seconds: float = 0.01
    numerics_id: str = "fake"
    is_exact: bool = False


class FakeExecutor:
    """Keeps every request's known tokens; samples when a step reaches their end."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, load_error: str = ""):
        self.info = FakeInfo(KVCacheConfig(block_size, num_blocks, ()))
        self.load_error = load_error
        self.plans: list[StepPlan] = []
        self.is_closed = False
        self._token_ids: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}

    def load(self) -> FakeInfo:
        if self.load_error:
            raise CheckpointError(self.load_error)
        return self.info

    def execute(self, plan: StepPlan) -> StepOutput:
        self.plans.append(plan)
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            del self._token_ids[request_id], self._num_computed[request_id]
        for request in plan.new_requests:
            self._token_ids[request.request_id] = list(request.token_ids)
            self._num_computed[request.request_id] = request.num_computed_tokens
        output = StepOutput(list(plan.num_scheduled_tokens), [], [], [])
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            output.token_ids.append(self._run(request_id, num_tokens, output))
            output.draft_token_ids.append([])
            output.draft_sources.append("")
        return output

    def _run(self, request_id: str, num_tokens: int, output: StepOutput) -> list[int]:
        token_ids = self._token_ids[request_id]
        first = token_ids[0]
        if first == RAISE_TOKEN:
            raise RuntimeError("the fake device is on fire")
        if first == FAIL_TOKEN:
            output.errors[request_id] = "the fake logits are NaN"
            return []
        if first == SLOW_TOKEN:
            time.sleep(SLOW_SECONDS)
        if first == EXIT_TOKEN:
            os._exit(7)
        self._num_computed[request_id] += num_tokens
        if self._num_computed[request_id] < len(token_ids):
            return []
        token_ids.append((token_ids[-1] + 1) % VOCAB_SIZE)
        return token_ids[-1:]

    def idle(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


def fake_config(
    path: str = "none", max_model_len: int = 100, async_scheduling: bool = False
) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(path=path, max_model_len=max_model_len),
        scheduler=SchedulerOptions(async_scheduling=async_scheduling),
    )


def fake_request(
    request_id: str, *prompt: int, max_tokens: int = 4, stop_token_ids: tuple[int, ...] = ()
) -> EngineRequest:
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, seed=0, stop_token_ids=stop_token_ids
    )
    return EngineRequest(request_id, list(prompt), params, time.monotonic())


def is_running(pid: int) -> bool:
    """Whether `pid` is a process, a zombie excepted."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def load(config: EngineConfig) -> EngineCore:
    """As `build_core`; the model's path says what goes wrong."""
    match config.model.path:
        case "damaged":
            return EngineCore(config, FakeExecutor(load_error="model.safetensors is damaged"))
        case "exits":
            os._exit(3)
        case "never":
            time.sleep(600)
        case "raises":
            raise RuntimeError("no such device")
    return EngineCore(config, FakeExecutor())


if __name__ == "__main__":
    sys.exit(process.main(load=load))
