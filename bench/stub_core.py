"""nano's engine core with a device of fixed step time (`bench.step_clock`) in place of a worker.

`python -m bench.stub_core` is `nano.engine.process` with it, `python -m bench.stub_server` the
server over that. All of it is real but the device: scheduler, sockets, codec, text, HTTP.
"""

import sys
from dataclasses import dataclass

from bench.step_clock import StepClock
from nano.config import EngineConfig
from nano.engine import process
from nano.engine.core import EngineCore
from nano.kv_spec import KVCacheConfig
from nano.speculation import ProposerInfo
from nano.step import StepOutput, StepPlan


@dataclass
class StubInfo:
    kv_cache: KVCacheConfig
    max_num_requests: int
    step_seconds: float
    token_budget: int = 8192
    num_lookahead_tokens: int = 0
    costly_context: int | None = None
    proposers: tuple[ProposerInfo, ...] = ()
    verification_seconds: tuple[tuple[int, float], ...] = ((1, 0.01),)
    numerics_id: str = "stub"
    is_exact: bool = False


class StubExecutor:
    """Every request in a step gets the step's token, as soon as all of its prompt is computed."""

    def __init__(self, clock: StepClock, max_num_requests: int):
        self._clock = clock
        self._info = StubInfo(
            KVCacheConfig(block_size=16, num_blocks=1 << 16, layers=()),
            max_num_requests,
            clock.seconds,
        )
        self._num_uncomputed: dict[str, int] = {}  # prompt tokens, by request id

    def load(self) -> StubInfo:
        return self._info

    def execute(self, plan: StepPlan) -> StepOutput:
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            del self._num_uncomputed[request_id]
        for request in plan.new_requests:
            num_uncomputed = len(request.token_ids) - request.num_computed_tokens
            self._num_uncomputed[request.request_id] = num_uncomputed
        token_ids: list[list[int]] = []
        token_id = self._clock.step()
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            left = max(self._num_uncomputed[request_id] - num_tokens, 0)
            self._num_uncomputed[request_id] = left
            token_ids.append([] if left else [token_id])
        num_requests = len(token_ids)
        return StepOutput(
            list(plan.num_scheduled_tokens),
            token_ids,
            draft_token_ids=[[] for _ in range(num_requests)],
            draft_sources=[""] * num_requests,
        )

    def idle(self) -> None:
        pass

    def close(self) -> None:
        pass


def load(config: EngineConfig) -> EngineCore:
    clock = StepClock.from_environment()
    return EngineCore(config, StubExecutor(clock, config.scheduler.max_num_requests))


if __name__ == "__main__":
    sys.exit(process.main(load=load))
