"""What the control plane costs per step: schedule() and update_from_output(), no model.

    pytest bench/bench_scheduler.py

Decode steps with 128-token prompts, block size 16, prefix caching on. All prompts are different,
so every hash and block is its own.
"""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from nano.kv_cache.kv_cache_manager import KVCacheManager
from nano.sampling_params import SamplingParams
from nano.scheduler.draft_planner import DraftPlanner
from nano.scheduler.draft_policy import DraftPolicy
from nano.scheduler.request import Request
from nano.scheduler.scheduler import Scheduler
from nano.speculation import ProposerInfo
from nano.step import StepOutput, StepPlan

PROMPT_LEN = 128
MAX_MODEL_LEN = 4096
PARAMS = SamplingParams(max_tokens=None, ignore_eos=True, seed=0)


NUM_DRAFTS = 4
DRAFTS = [1, 2, 3, 4]
PROPOSERS = {
    "text": ProposerInfo("text", NUM_DRAFTS, is_free=True),
    "model": ProposerInfo("model", NUM_DRAFTS, is_free=False, pass_seconds=0.001),
}


def make_scheduler(
    num_running: int, num_waiting: int = 0, drafts: DraftPlanner | None = None
) -> Scheduler:
    """A scheduler whose `num_running` requests have computed their prompts."""
    kv_cache = KVCacheManager(num_running * MAX_MODEL_LEN // 16, block_size=16)
    scheduler = Scheduler(
        kv_cache,
        max_model_len=MAX_MODEL_LEN,
        token_budget=num_running * PROMPT_LEN,
        max_num_requests=num_running,
        drafts=drafts,
    )
    for index in range(num_running + num_waiting):
        prompt = [index * PROMPT_LEN + offset for offset in range(PROMPT_LEN)]
        scheduler.add(Request(f"request-{index}", prompt, PARAMS))
    run_step(scheduler)
    return scheduler


def make_output(plan: StepPlan) -> StepOutput:
    num_requests = len(plan.num_scheduled_tokens)
    return StepOutput(
        request_ids=list(plan.num_scheduled_tokens),
        token_ids=[[7] for _ in range(num_requests)],
        draft_token_ids=[[] for _ in range(num_requests)],
        draft_sources=[""] * num_requests,
    )


def run_step(scheduler: Scheduler) -> int:
    plan = scheduler.schedule(now=0.0)
    return len(scheduler.update_from_output(plan, make_output(plan)))


@pytest.mark.parametrize("num_running", [1, 64, 256])
def test_a_decode_step(benchmark: BenchmarkFixture, num_running: int) -> None:
    scheduler = make_scheduler(num_running)
    assert benchmark.pedantic(run_step, (scheduler,), rounds=1500) == num_running


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_decode_step_of_256_with_4_drafts_each(
    benchmark: BenchmarkFixture, proposer: str
) -> None:
    """Asked for, verified, all wrong but the first; the policy learns from every step."""
    infos = [PROPOSERS[proposer]]
    flat = [(1, 0.1), (4096, 0.11)]  # so that all drafts are worth their while
    drafts = DraftPlanner(infos, DraftPolicy(infos, flat))
    scheduler = make_scheduler(256, drafts=drafts)

    def step() -> int:
        plan = scheduler.schedule(now=0.0)
        output = make_output(plan)
        for i, request_id in enumerate(output.request_ids):
            if request_id in plan.draft_token_ids:
                output.token_ids[i] = [1, 7]
            if request_id in plan.draft_requests:
                output.draft_token_ids[i], output.draft_sources[i] = DRAFTS.copy(), proposer
        news = scheduler.update_from_output(plan, output)
        drafts.observe_step(plan.num_tokens, output, 0.1, 0.001)
        return len(news)

    assert benchmark.pedantic(step, rounds=1500) == 256


def test_a_decode_step_of_256_with_10000_waiting(benchmark: BenchmarkFixture) -> None:
    scheduler = make_scheduler(256, num_waiting=10_000)
    assert benchmark.pedantic(run_step, (scheduler,), rounds=1500) == 256


def test_admission_of_a_2000_token_prompt(benchmark: BenchmarkFixture) -> None:
    """A new prompt each round: hashing, blocks, plan; then its abort."""
    kv_cache = KVCacheManager(1024, block_size=16)
    scheduler = Scheduler(
        kv_cache, max_model_len=MAX_MODEL_LEN, token_budget=8192, max_num_requests=1
    )

    def admit(request: Request) -> int:
        scheduler.add(request)
        plan = scheduler.schedule(now=0.0)
        scheduler.abort([request.request_id])
        scheduler.update_from_output(plan, make_output(plan))
        return plan.num_tokens

    prompts = iter(range(1_000_000))

    def setup() -> tuple[tuple[Request], dict[str, object]]:
        index = next(prompts)
        prompt = [index + 3 * offset for offset in range(2000)]
        return (Request(f"request-{index}", prompt, PARAMS),), {}

    assert benchmark.pedantic(admit, setup=setup, rounds=500) == 2000
