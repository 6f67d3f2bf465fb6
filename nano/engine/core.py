"""EngineCore: takes requests and runs steps. Owns the scheduler, the KV accounting, the executor.

Torch-free itself: `build_core` is where the worker, and with it torch, comes in.
"""

import time
from collections.abc import Sequence
from typing import Literal, Protocol

from nano.config import EngineConfig
from nano.engine.messages import EngineReady, EngineRequest
from nano.engine.pipeline import Pipeline
from nano.engine.step_counts import StepCounts
from nano.errors import InvalidRequest
from nano.kv_cache.kv_cache_manager import KVCacheManager
from nano.kv_spec import KVCacheConfig
from nano.outputs import FinishReason, TokenOutput
from nano.scheduler.deadlines import Deadlines
from nano.scheduler.draft_planner import DraftPlanner
from nano.scheduler.draft_policy import DraftPolicy
from nano.scheduler.request import Request
from nano.scheduler.scheduler import Scheduler
from nano.speculation import ProposerInfo
from nano.step import StepOutput, StepPlan, num_tokens_of
from nano.worker.build_kernels import build_kernels

ControlMethod = Literal["reset_prefix_cache", "stats"]


class WorkerInfo(Protocol):
    """What the core reads of `worker.worker.WorkerInfo`; importing that would import torch."""

    @property
    def kv_cache(self) -> KVCacheConfig: ...
    @property
    def token_budget(self) -> int: ...
    @property
    def max_num_requests(self) -> int: ...
    @property
    def num_lookahead_tokens(self) -> int: ...
    @property
    def costly_context(self) -> int | None: ...
    @property
    def proposers(self) -> tuple[ProposerInfo, ...]: ...
    @property
    def verification_seconds(self) -> tuple[tuple[int, float], ...]: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def numerics_id(self) -> str: ...
    @property
    def is_exact(self) -> bool: ...


class Executor(Protocol):
    """What the core calls of `worker.executor.Executor`."""

    def load(self) -> WorkerInfo: ...
    def execute(self, plan: StepPlan) -> StepOutput: ...
    def idle(self) -> None: ...
    def close(self) -> None: ...


class EngineCore:
    """The engine without its front end: tokens in, tokens out. Single-threaded.

    `config` is resolved; the constructor loads the model, raising `ConfigError` or
    `CheckpointError`. Every request that `add` takes ends in exactly one TokenOutput with a
    finish_reason, unless `step` raises: that is fatal, and takes all requests with it.
    """

    def __init__(self, config: EngineConfig, executor: Executor):
        assert config.model.max_model_len is not None, "the config is not resolved"
        self._executor = executor
        self._pipeline = Pipeline(executor, depth=2 if config.scheduler.async_scheduling else 1)
        info = self._pipeline.call(executor.load)
        kv_cache = KVCacheManager(
            num_blocks=info.kv_cache.num_blocks,
            block_size=info.kv_cache.block_size,
            enable_prefix_caching=config.kv_cache.enable_prefix_caching,
            num_lookahead_tokens=info.num_lookahead_tokens,
            root=info.numerics_id,
        )
        policy = DraftPolicy(
            info.proposers,
            info.verification_seconds,
            is_static=config.speculative.draft_length == "static",
        )
        self._drafts = DraftPlanner(info.proposers, policy)
        self._scheduler = Scheduler(
            kv_cache,
            max_model_len=config.model.max_model_len,
            token_budget=info.token_budget,
            max_num_requests=info.max_num_requests,
            policy=config.scheduler.policy,
            long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
            costly_context=info.costly_context,
            drafts=self._drafts,
        )
        self._deadlines = Deadlines()
        self._counts = StepCounts()
        self.step_seconds = info.step_seconds  # predicted for a full step
        self.ready = EngineReady(
            max_model_len=config.model.max_model_len,
            num_blocks=info.kv_cache.num_blocks,
            block_size=info.kv_cache.block_size,
            token_budget=info.token_budget,
            numerics_id=info.numerics_id,
            proposers=info.proposers,
            is_exact=info.is_exact,
            max_num_requests=info.max_num_requests,
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self._pipeline.num_in_flight > 0

    def add(self, request: EngineRequest) -> TokenOutput | None:
        """Queue a request. One that can never run is refused: the result says why."""
        queued = Request(
            request.request_id,
            request.prompt_token_ids,
            request.sampling_params,
            eos_token_ids=request.eos_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            speculation=request.speculation,
            prediction_token_ids=request.prediction_token_ids,
            traces_drafts=request.traces_drafts,
            deadline=request.deadline,
            queue_deadline=request.queue_deadline,
        )
        try:
            self._scheduler.add(queued)
        except InvalidRequest as error:
            return TokenOutput(request.request_id, [], FinishReason.ERROR, error=str(error))
        self._deadlines.watch(queued)
        return None

    def abort(self, request_ids: Sequence[str]) -> list[TokenOutput]:
        """End requests now; the last output of each. Unknown and finished ids are ignored."""
        return self._scheduler.abort(request_ids)

    def step(self) -> list[TokenOutput]:
        """End who is late, plan a step, and take what is new about the requests of the oldest one
        that is under way: this one, or with async scheduling the one before it.
        """
        began = time.monotonic()
        late: list[TokenOutput] = []
        for reason, request_ids in self._deadlines.due(began).items():
            late += self._scheduler.abort(request_ids, reason)
        plan = self._scheduler.schedule(began)
        if not plan.is_empty:
            self._pipeline.submit(plan)
        if not self._pipeline.is_full and not (plan.is_empty and self._pipeline.num_in_flight):
            return late
        done = self._pipeline.collect()
        news = self._scheduler.update_from_output(done.plan, done.output)
        num_tokens = num_tokens_of(done.plan, done.output)
        self._counts.add(num_tokens, news)
        # What runs while a plan is executed takes no time of its own.
        alone = 0.0 if self._pipeline.overlaps else time.monotonic() - began - done.seconds
        self._drafts.observe_step(num_tokens, done.output, done.seconds, alone)
        return late + news if late else news

    def idle(self) -> None:
        """To be called now and then while there is no work: the worker may have some of its own."""
        self._pipeline.call(self._executor.idle)

    def control(self, method: ControlMethod) -> dict[str, float]:
        """A maintenance call.

        reset_prefix_cache  forgets every cached prefix; {"is_reset": 0} while requests run
        stats               counts and shares, now and since the start
        """
        match method:
            case "reset_prefix_cache":
                return {"is_reset": float(self._scheduler.kv_cache.reset_prefix_cache())}
            case "stats":
                stats = self._scheduler.stats()
                return {
                    "num_running": stats.num_running,
                    "num_waiting": stats.num_waiting,
                    "kv_cache_usage": stats.kv_cache_usage,
                    "num_preemptions": stats.num_preemptions,
                    "num_prefix_query_tokens": stats.num_prefix_query_tokens,
                    "num_prefix_hit_tokens": stats.num_prefix_hit_tokens,
                    **self._counts.counters(),
                    **self._drafts.stats.counters(),
                    **self._drafts.policy.report(),
                }

    def close(self) -> None:
        """Let go of the worker and its memory."""
        self._pipeline.call(self._executor.close)
        self._pipeline.close()


def build_core(config: EngineConfig) -> EngineCore:
    """A core with the worker that a resolved `config` asks for."""
    build_kernels(config)
    from nano.worker.executor import make_executor  # torch: seconds

    return EngineCore(config, make_executor(config))
