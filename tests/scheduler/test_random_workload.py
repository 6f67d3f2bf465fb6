"""Ten thousand steps of requests that come, grow, collide, fail and go away, in tight caches.

The fake worker checks every slot of KV that a request reads; the scheduler checks itself after
each step; here every finished request is compared with the same request computed alone.
"""

import random
from dataclasses import dataclass, field

import pytest

from nano.kv_cache.kv_cache_manager import KVCacheManager
from nano.outputs import FinishReason
from nano.sampling_params import SamplingParams
from nano.scheduler.request import Request
from nano.scheduler.scheduler import Scheduler
from nano.step import StepPlan
from tests.scheduler.fake_worker import (
    EOS,
    VOCAB_SIZE,
    Driver,
    FakeWorker,
    draft_planner,
    expected_output,
)

NUM_STEPS = 2000  # of each of five workloads


@dataclass(frozen=True)
class Workload:
    name: str
    num_blocks: int
    block_size: int
    max_model_len: int = 48
    num_lookahead_tokens: int = 0
    enable_prefix_caching: bool = True
    num_draft_tokens: int = 0
    error_rate: float = 0.0
    scheduler: dict = field(default_factory=dict)


WORKLOADS = [
    Workload(
        "roomy", 64, 4, scheduler={"token_budget": 24, "max_num_requests": 6, "costly_context": 20}
    ),
    Workload(
        "crowded, slot by slot",
        40,
        1,
        num_draft_tokens=3,
        scheduler={"token_budget": 9, "max_num_requests": 8},
    ),
    Workload(
        "by priority, with lookahead",
        12,
        4,
        num_draft_tokens=4,
        num_lookahead_tokens=4,
        scheduler={"token_budget": 16, "max_num_requests": 5, "policy": "priority"},
    ),
    Workload(
        "failing, in capped chunks",
        14,
        4,
        num_draft_tokens=2,
        error_rate=0.02,
        scheduler={
            "token_budget": 12,
            "max_num_requests": 4,
            "long_prefill_token_threshold": 5,
            "costly_context": 15,
        },
    ),
    Workload(
        "without a prefix cache, fewer tokens than requests",
        12,
        3,
        enable_prefix_caching=False,
        error_rate=0.01,
        scheduler={"token_budget": 3, "max_num_requests": 5, "policy": "priority"},
    ),
]


class Traffic:
    """Adds and aborts requests at random; prompts share a few stems, so that prefixes collide."""

    def __init__(self, workload: Workload, seed: int, num_ahead: int):
        self.random = random.Random(seed)
        kv_cache = KVCacheManager(
            workload.num_blocks,
            workload.block_size,
            workload.enable_prefix_caching,
            workload.num_lookahead_tokens,
        )
        self.scheduler = Scheduler(
            kv_cache,
            max_model_len=workload.max_model_len,
            drafts=draft_planner(workload.num_draft_tokens),
            **workload.scheduler,
        )
        self.limit = min(workload.max_model_len, kv_cache.num_slots)
        worker = FakeWorker(
            workload.block_size,
            num_draft_tokens=workload.num_draft_tokens,
            error_rate=workload.error_rate,
            hides_drafts=num_ahead > 0,
            seed=seed,
        )
        self.driver = Driver(self.scheduler, worker, num_ahead)
        stem = [self.random.randrange(VOCAB_SIZE) for _ in range(20)]
        self.stems = [stem, stem[:11] + [1] * 9, [self.random.randrange(4) for _ in range(20)]]
        self.requests: dict[str, Request] = {}

    def add(self) -> None:
        rng = self.random
        prompt = rng.choice(self.stems)[: rng.randint(1, 20)]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 6))]
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 10, 30, None]),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=(5,) if rng.random() < 0.3 else (),
            prompt_logprobs=0 if rng.random() < 0.1 else None,
            logprobs=0 if rng.random() < 0.3 else None,
        )
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            params,
            eos_token_ids=(EOS,),
            priority=rng.randrange(3),
            cache_salt=rng.choice([None, None, "a"]),
        )
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def turn(self) -> None:
        rng = self.random
        if len(self.scheduler.waiting) < 8:
            for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
                self.add()
        if rng.random() < 0.05 and self.scheduler.requests:
            self.driver.collect(self.scheduler.abort([rng.choice(list(self.scheduler.requests))]))
        if rng.random() < 0.01:
            self.scheduler.kv_cache.reset_prefix_cache()
        if self.scheduler.has_work:
            self.driver.step()

    def check_results(self) -> None:
        assert self.driver.updates.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            updates, token_ids = self.driver.updates[request_id], self.driver.token_ids[request_id]
            assert sum(update.finish_reason is not None for update in updates) == 1
            params = request.sampling_params
            prompt = request.token_ids[: request.num_prompt_tokens]
            num_tokens = self.limit - len(prompt)
            if params.max_tokens is not None:
                num_tokens = min(num_tokens, params.max_tokens)
            stops = [*params.stop_token_ids, *([] if params.ignore_eos else [EOS])]
            expected = expected_output(prompt, num_tokens, stops)
            reason = updates[-1].finish_reason
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert token_ids == expected[: len(token_ids)]
                continue
            assert token_ids == expected
            is_stop = expected[-1] in stops
            assert reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            self.check_logprobs(request, prompt)

    def check_logprobs(self, request: Request, prompt: list[int]) -> None:
        updates = self.driver.updates[request.request_id]
        if request.sampling_params.logprobs is not None:
            told = [t for u in updates if u.logprobs for [t] in u.logprobs.token_ids]
            assert told == self.driver.token_ids[request.request_id]
        if request.sampling_params.prompt_logprobs is not None:
            parts = [u.prompt_logprobs for u in updates if u.prompt_logprobs]
            assert [t for part in parts for [t] in part.token_ids] == prompt[1:]
            positions = [-p for part in parts for [p] in part.logprobs]
            assert positions == list(range(1, len(prompt)))


def run(
    workload: Workload, num_steps: int, seed: int, num_ahead: int = 0
) -> tuple[Traffic, list[StepPlan]]:
    traffic = Traffic(workload, seed, num_ahead)
    while len(traffic.driver.plans) < num_steps:
        traffic.turn()
    traffic.driver.run()
    return traffic, traffic.driver.plans


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_request_ends_once_with_the_tokens_it_would_get_alone(
    workload: Workload, num_ahead: int
) -> None:
    traffic, _ = run(workload, NUM_STEPS, seed=1, num_ahead=num_ahead)
    traffic.check_results()
    assert traffic.scheduler.kv_cache.usage == 0.0
    assert len(traffic.requests) > 100
    reasons = {updates[-1].finish_reason for updates in traffic.driver.updates.values()}
    expected = {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    assert reasons == expected | ({FinishReason.ERROR} if workload.error_rate else set())
    stats = traffic.scheduler.stats()
    assert (stats.num_preemptions > 0) == (workload.name != "roomy")
    assert (stats.num_prefix_hit_tokens > 0) == workload.enable_prefix_caching
    has_drafts = any(plan.draft_token_ids for plan in traffic.driver.plans)
    assert has_drafts == (workload.num_draft_tokens > 0)


@pytest.mark.parametrize("workload", WORKLOADS[1:3], ids=lambda workload: workload.name)
def test_equal_histories_give_equal_plans(workload: Workload) -> None:
    assert run(workload, 200, seed=2)[1] == run(workload, 200, seed=2)[1]
