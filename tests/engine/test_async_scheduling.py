"""A step that is planned while the one before it is computed: nobody can tell from the tokens.

The scheduler's own workloads have both ways (`tests/scheduler/test_random_workload.py`); here are
whole engines, and the overlap itself.
"""

import random
import threading

import pytest

from nano.config import EngineConfig
from nano.engine.core import EngineCore
from nano.outputs import FinishReason, RequestOutput
from nano.step import DRAFT_ON_DEVICE, StepOutput, StepPlan
from tests.engine.fake_core import (
    FAIL_TOKEN,
    RAISE_TOKEN,
    FakeExecutor,
    fake_config,
    fake_request,
)
from tests.engine.test_core import finishes, tokens
from tests.engine.test_core import run as run_core
from tests.engine.test_invisibility import NUM_REQUESTS, REQUESTS, assert_same
from tests.engine.test_speculation import PROPOSERS, make_llm, proposer, run


@pytest.fixture(scope="module")
def golden(target) -> list[RequestOutput]:
    """Each request alone, one step after the other."""
    with make_llm(target, [], enable_prefix_caching=False) as llm:
        return [run(llm, [request])[0] for request in REQUESTS]


@pytest.mark.parametrize("names", [(), *[(name,) for name in PROPOSERS], PROPOSERS])
@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("length", ["static", "auto"])
def test_it_is_invisible_with_every_proposer(target, other, golden, names, preempts, length):
    if not names and length == "auto":
        pytest.skip("there is nothing to choose")
    shape = {"num_gpu_blocks_override": 7, "max_num_batched_tokens": 24} if preempts else {}
    proposers = [proposer(name, target, other, 4) for name in names]
    order = random.Random(len(names)).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    with make_llm(target, proposers, length, async_scheduling=True, **shape) as llm:
        for _ in range(2):  # the second time over a warm cache, and past outputs
            outputs = run(llm, [REQUESTS[i] for i in order])
            assert_same(outputs, [golden[i] for i in order], "float32")
        stats = llm.stats()
    assert (stats["num_preemptions"] > 0) == preempts
    assert stats["kv_cache_usage"] == 0
    if names and length == "static":
        assert stats["spec_decode_num_draft_tokens"] > 50
    if names == ("same",) and length == "static":  # no hole in the draft's KV, no draft too many
        assert stats["spec_decode_num_accepted_tokens"] == stats["spec_decode_num_draft_tokens"]


def test_an_answer_reports_the_drafts_that_were_verified_not_those_that_could_have_been(
    target, other
):
    prompt, params = REQUESTS[1]
    reports = []
    for is_async in (False, True):
        with make_llm(
            target, [proposer("same", target, other, 3)], async_scheduling=is_async
        ) as llm:
            [output] = llm.generate([prompt], [params], speculative_trace=True, use_tqdm=False)
        reports.append((output.outputs[0].speculative, output.outputs[0].speculative_trace))
    assert reports[0] == reports[1]


class WaitingExecutor(FakeExecutor):
    """Its device ends a step only once the next one is planned, or none will be."""

    def __init__(self) -> None:
        super().__init__()
        self.has_next = threading.Semaphore(0)
        self.num_waited = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        if self.has_next.acquire(timeout=10):
            self.num_waited += 1
        return super().execute(plan)


def overlapping() -> EngineConfig:
    return fake_config(async_scheduling=True)


def test_the_next_step_is_planned_while_one_is_computed() -> None:
    executor = WaitingExecutor()
    core = EngineCore(overlapping(), executor)
    schedule = core._scheduler.schedule

    def watched(now: float) -> StepPlan:
        plan = schedule(now)
        if core._pipeline.num_in_flight:
            executor.has_next.release()
        return plan

    core._scheduler.schedule = watched  # type: ignore[method-assign]
    outputs = run_core(core, fake_request("a", 1, max_tokens=9), fake_request("b", 5, max_tokens=3))
    assert tokens(outputs["a"]) == list(range(2, 11))
    assert tokens(outputs["b"]) == [6, 7, 8]
    assert executor.num_waited == len(executor.plans) >= 9


def test_a_step_that_was_planned_for_a_request_that_has_ended_is_dropped() -> None:
    executor = FakeExecutor()
    core = EngineCore(overlapping(), executor)
    outputs = run_core(core, fake_request("a", 1, max_tokens=20, stop_token_ids=(4,)))
    assert tokens(outputs["a"]) == [2, 3, 4]
    assert finishes(outputs["a"]) == [FinishReason.STOP]
    assert len(executor.plans) == 4  # one more than it had tokens
    assert not core.has_work


def test_a_length_that_is_known_costs_no_step_too_many() -> None:
    executor = FakeExecutor()
    core = EngineCore(overlapping(), executor)
    outputs = run_core(core, fake_request("a", 1, max_tokens=3))
    assert finishes(outputs["a"]) == [FinishReason.LENGTH]
    assert len(executor.plans) == 3


def test_an_abort_between_two_steps_ends_the_request_once() -> None:
    core = EngineCore(overlapping(), FakeExecutor())
    core.add(fake_request("a", 1, max_tokens=50))
    core.add(fake_request("b", 1, max_tokens=6))
    outputs = [output for _ in range(4) for output in core.step()]
    outputs += core.abort(["a"])
    while core.has_work:
        outputs += core.step()
    assert finishes([o for o in outputs if o.request_id == "a"]) == [FinishReason.ABORT]
    assert tokens([o for o in outputs if o.request_id == "b"]) == [2, 3, 4, 5, 6, 7]


def test_a_request_that_fails_ends_alone_although_its_next_step_is_under_way() -> None:
    core = EngineCore(overlapping(), FakeExecutor())
    outputs = run_core(
        core, fake_request("bad", FAIL_TOKEN, max_tokens=9), fake_request("good", 1, max_tokens=9)
    )
    assert finishes(outputs["bad"]) == [FinishReason.ERROR]
    assert tokens(outputs["good"]) == list(range(2, 11))


def test_what_a_step_raises_is_raised_by_the_core() -> None:
    core = EngineCore(overlapping(), FakeExecutor())
    core.add(fake_request("a", RAISE_TOKEN))
    with pytest.raises(RuntimeError, match="on fire"):
        run_core(core)
    core.close()


def test_a_plan_ahead_has_placeholders_where_it_cannot_know(target, other, monkeypatch) -> None:
    plans: list[StepPlan] = []
    with make_llm(target, [proposer("same", target, other, 3)], async_scheduling=True) as llm:
        core = llm._client._core  # type: ignore[attr-defined]
        submit = core._pipeline.submit
        monkeypatch.setattr(
            core._pipeline, "submit", lambda plan: (plans.append(plan), submit(plan))
        )
        run(llm, [([1, 2, 3], REQUESTS[1][1])])
    drafts = [token_id for plan in plans for d in plan.draft_token_ids.values() for token_id in d]
    assert set(drafts) == {DRAFT_ON_DEVICE}
