"""The scheduler's rules, one by one, against a worker without a model."""

from typing import Any

import pytest

from nano.errors import InvalidRequest
from nano.kv_cache.kv_cache_manager import KVCacheManager
from nano.outputs import FinishReason
from nano.sampling_params import SamplingParams
from nano.scheduler.invariants import check_invariants
from nano.scheduler.request import Request
from nano.scheduler.scheduler import Scheduler
from nano.scheduler.step_time import StepLoad
from nano.step import DRAFT_ON_DEVICE, StepOutput, StepPlan
from tests.scheduler.fake_worker import (
    EOS,
    JUNK,
    Driver,
    FakeWorker,
    draft_planner,
    expected_output,
    make_logprobs,
)


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    token_budget: int = 64,
    max_num_requests: int = 8,
    max_model_len: int = 256,
    num_lookahead_tokens: int = 0,
    enable_prefix_caching: bool = True,
    num_draft_tokens: int = 8,
    **options: object,
) -> Scheduler:
    kv_cache = KVCacheManager(num_blocks, block_size, enable_prefix_caching, num_lookahead_tokens)
    return Scheduler(
        kv_cache,
        max_model_len=max_model_len,
        token_budget=token_budget,
        max_num_requests=max_num_requests,
        drafts=draft_planner(num_draft_tokens),
        **options,  # type: ignore[arg-type]
    )


def make_request(
    request_id: str, prompt: list[int] | int, *, priority: int = 0, eos: int = -1, **params: object
) -> Request:
    """`prompt` as a number is that many tokens no other request has."""
    if isinstance(prompt, int):
        seed = sum(request_id.encode()) * 1000
        prompt = [seed + index for index in range(prompt)]
    params.setdefault("max_tokens", 4)
    return Request(
        request_id,
        prompt,
        SamplingParams(**params),  # type: ignore[arg-type]
        eos_token_ids=(eos,),
        priority=priority,
    )


def answer(plan: StepPlan, **tokens: list[int]) -> StepOutput:
    """An output written by hand; requests not named go on with their prompt."""
    ids = list(plan.num_scheduled_tokens)
    return StepOutput(ids, [tokens.get(r, []) for r in ids], [[] for _ in ids], [""] * len(ids))


def with_drafts(output: StepOutput, request_id: str, drafts: list[int]) -> StepOutput:
    index = output.request_ids.index(request_id)
    output.draft_token_ids[index], output.draft_sources[index] = drafts, JUNK if drafts else ""
    return output


def start_decoding(scheduler: Scheduler, request: Request, drafts: list[int]) -> None:
    """Compute the whole prompt, sample token 7, propose `drafts`."""
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan.num_scheduled_tokens[request.request_id] == request.num_prompt_tokens
    name = request.request_id
    scheduler.update_from_output(plan, with_drafts(answer(plan, **{name: [7]}), name, drafts))


class TestAdding:
    def test_an_empty_prompt_is_refused(self) -> None:
        scheduler = make_scheduler()
        with pytest.raises(InvalidRequest, match="at least 1 token, got 0"):
            scheduler.add(make_request("a", []))
        assert not scheduler.has_work

    # B045
    def test_an_id_in_use_is_refused_and_its_owner_is_unaffected(self) -> None:
        driver = Driver(make_scheduler())
        driver.scheduler.add(make_request("x", [1, 2, 3]))
        for _ in range(2):  # once while it waits, once while it runs
            with pytest.raises(InvalidRequest, match="'x' is in use") as error:
                driver.scheduler.add(make_request("x", [9]))
            assert error.value.param == "request_id"
            driver.step()
        driver.run()
        assert driver.token_ids["x"] == expected_output([1, 2, 3], 4)
        driver.scheduler.add(make_request("x", [9]))  # free again
        driver.updates.clear()
        driver.run()
        assert driver.finish_reason("x") is FinishReason.LENGTH

    @pytest.mark.parametrize(
        ("num_tokens", "limit"), [(256, "max_model_len, 256"), (300, "max_model_len, 256")]
    )
    def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(
        self, num_tokens: int, limit: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=f"of {num_tokens} tokens .* {limit} tokens"):
            make_scheduler(num_blocks=1000).add(make_request("a", num_tokens))

    def test_the_longest_prompt_that_fits_gets_its_token(self) -> None:
        driver = Driver(make_scheduler(num_blocks=1000))
        driver.scheduler.add(make_request("a", 255))
        driver.run()
        assert driver.finish_reason("a") is FinishReason.LENGTH
        assert len(driver.token_ids["a"]) == 1


class TestCapacity:
    # B043
    def test_a_prompt_larger_than_the_cache_is_refused_naming_both_numbers(self) -> None:
        scheduler = make_scheduler(16, 16, max_model_len=1024)
        with pytest.raises(InvalidRequest, match=r"of 400 tokens .* KV cache, 256 tokens"):
            scheduler.add(make_request("a", 400))
        with pytest.raises(InvalidRequest, match="of 256 tokens"):
            scheduler.add(make_request("a", 256))
        assert not scheduler.has_work

    # B043
    @pytest.mark.parametrize("num_lookahead_tokens", [0, 3])
    def test_a_request_that_outgrows_the_cache_ends_with_length_and_others_go_on(
        self, num_lookahead_tokens: int
    ) -> None:
        driver = Driver(
            make_scheduler(16, 16, max_model_len=1024, num_lookahead_tokens=num_lookahead_tokens)
        )
        driver.scheduler.add(make_request("big", 200, max_tokens=200))
        driver.scheduler.add(make_request("short", 20))
        driver.run(max_steps=100)
        assert driver.finish_reason("big") is FinishReason.LENGTH
        assert len(driver.token_ids["big"]) == 56
        assert len(driver.token_ids["short"]) == 4

    def test_two_requests_that_each_fill_the_cache_finish_one_after_the_other(self) -> None:
        driver = Driver(make_scheduler(4, 4))
        for name in ("a", "b"):
            driver.scheduler.add(make_request(name, [ord(name)] * 8, max_tokens=100))
        driver.run(max_steps=60)
        for name in ("a", "b"):
            assert driver.finish_reason(name) is FinishReason.LENGTH
            assert driver.token_ids[name] == expected_output([ord(name)] * 8, 8)


class TestBudget:
    def test_a_long_prompt_is_computed_in_chunks_of_the_budget(self) -> None:
        driver = Driver(make_scheduler(token_budget=10))
        driver.scheduler.add(make_request("a", 25, max_tokens=2))
        driver.run()
        assert [plan.num_scheduled_tokens["a"] for plan in driver.plans] == [10, 10, 5, 1]
        assert [plan.num_computed_tokens["a"] for plan in driver.plans] == [0, 10, 20, 25]

    def test_the_threshold_caps_prompts_and_leaves_budget_to_others(self) -> None:
        driver = Driver(make_scheduler(token_budget=32, long_prefill_token_threshold=6))
        driver.scheduler.add(make_request("a", 14))
        driver.scheduler.add(make_request("b", 3))
        driver.step()
        driver.step()
        # Six, shortened to end with a block of four.
        assert driver.plans[0].num_scheduled_tokens == {"a": 4, "b": 3}
        assert driver.plans[1].num_scheduled_tokens == {"a": 4, "b": 1}

    def test_chunks_take_of_the_budget_what_they_cost_at_their_context(self) -> None:
        scheduler = make_scheduler(
            1024, 16, token_budget=300, max_model_len=9000, costly_context=1000
        )
        driver = Driver(scheduler)
        scheduler.add(make_request("a", 5000, max_tokens=1))
        driver.run()
        start = 0
        for plan in driver.plans:
            num_tokens = plan.num_scheduled_tokens["a"]
            cost = num_tokens * (1 + (start + num_tokens / 2) / 1000)
            assert cost <= 300
            start += num_tokens
            # And no chunk is smaller than it must be, but for the last one.
            more = (num_tokens + 2) * (1 + (start + 1) / 1000)
            assert more > 300 or start == 5000
        sizes = [plan.num_scheduled_tokens["a"] for plan in driver.plans]
        assert sizes[0] > 250
        assert 45 <= sizes[-2] <= 60

    def test_two_long_prompts_share_what_one_step_may_cost_and_no_stream_stalls(self) -> None:
        scheduler = make_scheduler(
            2048, 16, token_budget=300, max_model_len=9000, costly_context=1000
        )
        driver = Driver(scheduler)
        scheduler.add(make_request("stream", 5, max_tokens=60))
        driver.step()
        for name, first in (("a", 0), ("b", 7)):
            scheduler.add(make_request(name, list(range(first, first + 4000)), max_tokens=1))
        while len(driver.token_ids["stream"]) < 60:
            driver.step()
            assert driver.plans[-1].num_scheduled_tokens.get("stream") == 1
            cost = sum(
                num * (1 + (driver.plans[-1].num_computed_tokens[name] + num / 2) / 1000)
                for name, num in driver.plans[-1].num_scheduled_tokens.items()
                if name != "stream"
            )
            assert cost <= 300 + 5  # the last token of a chunk may cost a few
        driver.run()

    def test_a_threshold_below_the_block_size_still_makes_progress(self) -> None:
        driver = Driver(make_scheduler(token_budget=32, long_prefill_token_threshold=3))
        driver.scheduler.add(make_request("a", 9, max_tokens=1))
        driver.run()
        assert [plan.num_scheduled_tokens["a"] for plan in driver.plans] == [3, 1, 3, 2]

    def test_the_threshold_does_not_cap_a_decode_token_and_its_drafts(self) -> None:
        scheduler = make_scheduler(long_prefill_token_threshold=2)
        request = make_request("a", 2, max_tokens=20)
        start_decoding(scheduler, request, drafts=[1, 2, 3, 4])
        assert scheduler.schedule(0.0).num_scheduled_tokens == {"a": 5}

    def test_running_requests_come_before_waiting_ones(self) -> None:
        driver = Driver(make_scheduler(token_budget=8))
        driver.scheduler.add(make_request("a", 12))
        driver.step()
        driver.scheduler.add(make_request("b", 12))
        driver.step()
        assert driver.plans[1].num_scheduled_tokens == {"a": 4, "b": 4}
        driver.step()
        assert driver.plans[2].num_scheduled_tokens == {"a": 1, "b": 7}

    # B049
    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_a_stream_gets_a_token_in_every_step_while_prompts_are_computed(
        self, policy: str
    ) -> None:
        driver = Driver(
            make_scheduler(2000, 16, token_budget=256, max_model_len=4096, policy=policy)
        )
        driver.scheduler.add(make_request("A", 10, max_tokens=200))
        driver.step()
        for index, length in enumerate([3000] + [1500] * 5):
            # More urgent than A: its prompt then stands before A, and must still leave it a token.
            driver.scheduler.add(make_request(f"B{index}", length, priority=-1, max_tokens=3))
        while driver.finish_reason("A") is None:
            updates = driver.step()
            assert "A" in [update.request_id for update in updates]
        driver.run()
        assert len(driver.updates) == 7

    def test_drafts_do_not_starve_the_requests_behind(self) -> None:
        scheduler = make_scheduler(token_budget=4)
        start_decoding(scheduler, make_request("a", 2, max_tokens=50), drafts=[])
        scheduler.add(make_request("b", 2))
        plan = scheduler.schedule(0.0)
        output = with_drafts(answer(plan, a=[7], b=[7]), "a", [1, 2, 3, 4, 5])
        scheduler.update_from_output(plan, output)
        plan = scheduler.schedule(0.0)
        assert plan.num_scheduled_tokens == {"a": 3, "b": 1}
        assert plan.draft_token_ids == {"a": [1, 2]}

    def test_at_most_max_num_requests_run(self) -> None:
        driver = Driver(make_scheduler(max_num_requests=2))
        for name in "abc":
            driver.scheduler.add(make_request(name, 3))
        driver.step()
        assert list(driver.plans[0].num_scheduled_tokens) == ["a", "b"]
        stats = driver.scheduler.stats()
        assert (stats.num_running, stats.num_waiting) == (2, 1)
        driver.run()
        assert len(driver.updates) == 3


class TestDrafts:
    def test_the_policy_is_told_how_many_tokens_and_outputs_the_next_step_has(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler = make_scheduler(token_budget=8)
        told: list[StepLoad] = []
        policy = scheduler.drafts.policy
        monkeypatch.setattr(policy, "choose", lambda candidates, load: told.append(load) or {})
        for name, length in (("short", 2), ("long", 15)):
            scheduler.add(make_request(name, length))
        driver = Driver(scheduler)
        for _ in range(3):
            driver.step()
        # 2 + 6 tokens; then 1 of short and 9 of long, of which 7 fit in; then long samples too.
        assert told == [StepLoad(8, 1), StepLoad(3, 2), StepLoad(2, 2)]

    def test_drafts_are_scheduled_after_the_newest_token_and_counted_when_accepted(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", 5, max_tokens=20)
        start_decoding(scheduler, request, drafts=[1, 2, 3])
        plan = scheduler.schedule(0.0)
        assert plan.draft_token_ids == {"a": [1, 2, 3]}
        assert plan.num_scheduled_tokens == {"a": 4}
        [update] = scheduler.update_from_output(plan, answer(plan, a=[1, 2, 9]))
        assert update.new_token_ids == [1, 2, 9]
        assert request.num_computed_tokens == request.num_tokens - 1 == 8

    def test_drafts_that_the_worker_keeps_to_itself_are_planned_as_placeholders(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", 5, max_tokens=20)
        start_decoding(scheduler, request, drafts=[DRAFT_ON_DEVICE] * 3)
        plan = scheduler.schedule(0.0)
        assert plan.draft_token_ids == {"a": [DRAFT_ON_DEVICE] * 3}
        output = answer(plan, a=[1, 9])
        output.verified_token_ids = {"a": [1, 2, 3]}
        [update] = scheduler.update_from_output(plan, output)
        assert update.new_token_ids == [1, 9]
        assert request.num_computed_tokens == request.num_tokens - 1 == 7
        counted = scheduler.drafts.stats.by_proposer[JUNK]
        assert (counted.num_draft_tokens, counted.num_accepted_tokens) == (3, 1)

    def test_drafts_that_were_not_worth_a_step_are_compared_all_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler = make_scheduler()
        observed: list[tuple[Any, ...]] = []
        policy = scheduler.drafts.policy
        monkeypatch.setattr(policy, "trim", lambda drafts, load: dict.fromkeys(drafts, 0))
        monkeypatch.setattr(policy, "observe_unverified", lambda *args: observed.append(args))
        start_decoding(scheduler, make_request("a", 5, max_tokens=20), [DRAFT_ON_DEVICE] * 3)
        for unverified, num_right in ((8, 0), (9, 1)):
            plan = scheduler.schedule(0.0)
            assert plan.draft_token_ids == {}
            output = with_drafts(answer(plan, a=[9]), "a", [DRAFT_ON_DEVICE])
            output.unverified_token_ids = {"a": unverified}
            scheduler.update_from_output(plan, output)
            assert observed.pop() == ("a", JUNK, num_right, 1)

    def test_a_rejected_draft_is_not_computed(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", 5, max_tokens=20)
        start_decoding(scheduler, request, drafts=[1, 2])
        plan = scheduler.schedule(0.0)
        scheduler.update_from_output(plan, answer(plan, a=[9]))
        assert request.num_computed_tokens == 6
        plan = scheduler.schedule(0.0)
        assert (plan.num_scheduled_tokens, plan.draft_token_ids) == ({"a": 1}, {})

    @pytest.mark.parametrize(
        ("limits", "prompt_len"),
        [
            ({"max_tokens": 4}, 5),
            ({"max_model_len": 9}, 5),
            ({"num_blocks": 2, "block_size": 4}, 4),
        ],
    )
    def test_drafts_that_could_never_be_accepted_are_trimmed(
        self, limits: dict[str, int], prompt_len: int
    ) -> None:
        max_tokens = limits.pop("max_tokens", 100)
        scheduler = make_scheduler(**limits)  # type: ignore[arg-type]
        request = make_request("a", prompt_len, max_tokens=max_tokens)
        start_decoding(scheduler, request, drafts=[1, 2, 3, 4, 5])
        plan = scheduler.schedule(0.0)
        # Four tokens in all, one is there: two drafts and the token after them.
        assert plan.draft_token_ids == {"a": [1, 2]}
        [update] = scheduler.update_from_output(plan, answer(plan, a=[1, 2, 3]))
        assert update.finish_reason is FinishReason.LENGTH
        assert len(update.new_token_ids) == 3

    def test_the_last_token_is_decoded_without_drafts(self) -> None:
        scheduler = make_scheduler()
        start_decoding(scheduler, make_request("a", 5, max_tokens=2), drafts=[1, 2])
        plan = scheduler.schedule(0.0)
        assert (plan.num_scheduled_tokens, plan.draft_token_ids) == ({"a": 1}, {})

    def test_drafts_are_dropped_before_anybody_is_preempted_for_them(self) -> None:
        scheduler = make_scheduler(4, 4)
        for name in "ab":
            scheduler.add(make_request(name, 7, max_tokens=9))
        plan = scheduler.schedule(0.0)
        output = with_drafts(answer(plan, a=[7], b=[7]), "a", [1, 2, 3])
        scheduler.update_from_output(plan, output)
        plan = scheduler.schedule(0.0)  # a has a slot for one token; its drafts need a block
        assert plan.num_scheduled_tokens == {"a": 1, "b": 1}
        assert plan.draft_token_ids == {}
        assert scheduler.stats().num_preemptions == 0

    def test_tokens_after_a_stop_are_dropped_with_their_logprobs(self) -> None:
        scheduler = make_scheduler()
        request = make_request("a", 5, eos=EOS, max_tokens=20, logprobs=0)
        start_decoding(scheduler, request, drafts=[1, EOS, 3])
        plan = scheduler.schedule(0.0)
        output = answer(plan, a=[1, EOS, 3, 4])
        output.logprobs["a"] = make_logprobs([1, EOS, 3, 4], 6)
        [update] = scheduler.update_from_output(plan, output)
        assert update.new_token_ids == [1, EOS]
        assert update.logprobs == make_logprobs([1, EOS], 6)
        assert (update.finish_reason, update.stop_token_id) == (FinishReason.STOP, None)

    def test_blocks_of_accepted_drafts_are_cached_and_of_rejected_ones_are_not(self) -> None:
        scheduler = make_scheduler(block_size=4)
        request = make_request("a", [5, 5, 5], max_tokens=50)
        start_decoding(scheduler, request, drafts=[1, 2, 3, 4, 5])
        plan = scheduler.schedule(0.0)  # computes 7 and the drafts: two blocks and a slot

        def num_cached(tokens: list[int]) -> int:
            return scheduler.kv_cache.match_prefix(make_request("probe", tokens)).num_tokens

        written = [5, 5, 5, 7, 1, 2, 3, 4, 5]
        assert num_cached(written) == 4  # known tokens only
        scheduler.update_from_output(plan, answer(plan, a=[1, 2, 9]))
        assert num_cached(written) == num_cached([5, 5, 5, 7, 1, 2, 9, 0]) == 4
        plan = scheduler.schedule(0.0)
        scheduler.update_from_output(plan, answer(plan, a=[6]))
        assert num_cached([5, 5, 5, 7, 1, 2, 9, 6]) == 4  # the last token is never hit
        assert num_cached([5, 5, 5, 7, 1, 2, 9, 6, 0]) == 4
        plan = scheduler.schedule(0.0)
        assert num_cached([5, 5, 5, 7, 1, 2, 9, 6, 0]) == 8

    def test_accepted_drafts_of_the_last_step_are_cached_for_the_next_turn(self) -> None:
        scheduler = make_scheduler(block_size=4)
        start_decoding(scheduler, make_request("a", [5, 5, 5], max_tokens=6), [1, 2, 3, 4])
        plan = scheduler.schedule(0.0)
        [update] = scheduler.update_from_output(plan, answer(plan, a=[1, 2, 3, 4, 6]))
        assert update.finish_reason is FinishReason.LENGTH
        next_turn = make_request("b", [5, 5, 5, 7, 1, 2, 3, 4, 6, 0])
        assert scheduler.kv_cache.match_prefix(next_turn).num_tokens == 8


class TestPreemption:
    def test_the_last_admitted_gives_way_and_nobody_is_admitted_in_that_step(self) -> None:
        driver = Driver(make_scheduler(6, 4, enable_prefix_caching=False))
        for name in "abc":
            driver.scheduler.add(make_request(name, 7, max_tokens=5))
        driver.step()
        driver.scheduler.add(make_request("d", 1))
        while not driver.scheduler.stats().num_preemptions:
            driver.step()
        plan = driver.plans[-1]
        assert plan.preempted_request_ids == ["c"]
        assert list(plan.num_scheduled_tokens) == ["a", "b"]
        assert plan.new_requests == []
        driver.run()
        admitted = [new.request_id for plan in driver.plans for new in plan.new_requests]
        assert admitted == ["a", "b", "c", "c", "d"]  # the victim returns before d
        for name in "abcd":
            prompt = make_request(name, 1 if name == "d" else 7).token_ids
            assert driver.token_ids[name] == expected_output(prompt, 4 if name == "d" else 5)

    def test_not_even_a_more_urgent_request_is_admitted_while_evicting(self) -> None:
        scheduler = make_scheduler(
            6, 4, policy="priority", max_num_requests=3, enable_prefix_caching=False
        )
        driver = Driver(scheduler)
        for name, length in (("a", 7), ("b", 5), ("c", 7)):
            scheduler.add(make_request(name, length, max_tokens=5))
        driver.step()
        scheduler.add(make_request("urgent", 1, priority=-1))
        while not scheduler.stats().num_preemptions:
            driver.step()
        assert driver.plans[-1].preempted_request_ids == ["c"]  # a row and a block are free
        assert driver.plans[-1].new_requests == []
        driver.step()
        assert [new.request_id for new in driver.plans[-1].new_requests] == ["urgent"]

    def test_under_priority_the_least_urgent_gives_way_and_of_equals_the_latest(self) -> None:
        driver = Driver(make_scheduler(6, 4, policy="priority", enable_prefix_caching=False))
        for name, priority in (("a", 2), ("b", 0), ("c", 2)):
            driver.scheduler.add(make_request(name, 7, priority=priority, max_tokens=9))
        driver.step()
        assert list(driver.plans[0].num_scheduled_tokens) == ["b", "a", "c"]
        while driver.scheduler.stats().num_preemptions < 1:
            driver.step()
        assert driver.plans[-1].preempted_request_ids == ["c"]
        while driver.scheduler.stats().num_preemptions < 2:
            driver.step()
        assert driver.plans[-1].preempted_request_ids == ["a"]
        assert driver.finish_reason("b") is None
        driver.run()
        assert all(len(tokens) == 9 for tokens in driver.token_ids.values())

    def test_a_preempted_request_is_sent_again_with_all_it_knows(self) -> None:
        driver = Driver(make_scheduler(4, 4))
        for name in "ab":
            driver.scheduler.add(make_request(name, 6, max_tokens=10))
        driver.run()
        sent = [new for plan in driver.plans for new in plan.new_requests]
        again = next(new for new in sent[2:] if new.request_id == "b")
        assert again.num_prompt_tokens == 6
        assert again.token_ids[6:] == driver.token_ids["b"][: len(again.token_ids) - 6] != []

    def test_a_preempted_request_reads_its_own_prefix_back_from_the_cache(self) -> None:
        scheduler = make_scheduler(8, 4, max_num_requests=2)
        victim = make_request("b", 13, max_tokens=15)
        scheduler.add(make_request("a", 15, max_tokens=4))
        scheduler.add(victim)
        driver = Driver(scheduler)
        while not victim.num_preemptions:
            driver.step()
        assert victim.num_computed_tokens == 0
        driver.run()
        readmission = [new for plan in driver.plans for new in plan.new_requests][2]
        assert readmission.request_id == "b"
        assert readmission.num_computed_tokens >= 8
        # What a client is told is the hit of the first admission.
        assert driver.updates["b"][0].num_cached_tokens == 0

    def test_the_reported_hit_is_that_of_the_first_admission(self) -> None:
        driver = Driver(make_scheduler(token_budget=9))
        driver.scheduler.add(make_request("a", 20))
        driver.step()  # a chunk, nothing to report yet
        driver.scheduler._preempt(driver.scheduler.running.pop())
        driver.run()
        assert driver.plans[1].num_computed_tokens == {"a": 8}
        first = driver.updates["a"][0]
        assert (first.num_cached_tokens, first.first_scheduled_time) == (0, 0.0)

    def test_drafts_of_a_preempted_request_are_dropped(self) -> None:
        scheduler = make_scheduler(4, 4, enable_prefix_caching=False)
        a, b = make_request("a", 7, max_tokens=9), make_request("b", 7, max_tokens=9)
        scheduler.add(a)
        scheduler.add(b)
        for token in (7, 7):
            plan = scheduler.schedule(0.0)
            output = answer(plan, a=[token], b=[token])
            scheduler.update_from_output(plan, with_drafts(output, "b", [1, 2]))
        plan = scheduler.schedule(0.0)  # a needs a third block
        assert plan.num_scheduled_tokens == {"a": 1}
        assert b.draft_token_ids == []
        assert b.num_preemptions == 1
        check_invariants(scheduler)

    def test_a_half_computed_prompt_gives_way_only_to_the_requests_before_it(self) -> None:
        driver = Driver(make_scheduler(8, 4, token_budget=6))
        driver.scheduler.add(make_request("a", 4, max_tokens=20))
        driver.scheduler.add(make_request("b", 20, max_tokens=4))
        driver.run()
        assert driver.token_ids["a"] == expected_output(make_request("a", 4).token_ids, 20)
        assert driver.token_ids["b"] == expected_output(make_request("b", 20).token_ids, 4)

    # B048: chaos of priorities and lengths in a small cache, with and without drafts.
    @pytest.mark.parametrize("num_draft_tokens", [0, 3])
    @pytest.mark.parametrize("policy", ["fcfs", "priority"])
    def test_a_crowded_cache_changes_no_token(self, policy: str, num_draft_tokens: int) -> None:
        scheduler = make_scheduler(
            10, 4, policy=policy, max_num_requests=6, num_draft_tokens=num_draft_tokens
        )
        driver = Driver(scheduler, FakeWorker(4, num_draft_tokens=num_draft_tokens))
        requests = [
            make_request(f"r{i}", 3 + 5 * i % 17, priority=i * 7 % 4, max_tokens=5 + i)
            for i in range(12)
        ]
        prompts = {request.request_id: request.token_ids.copy() for request in requests}
        for request in requests:
            scheduler.add(request)
        driver.run()
        assert scheduler.stats().num_preemptions > 0
        for index, (request_id, prompt) in enumerate(prompts.items()):
            assert driver.token_ids[request_id] == expected_output(prompt, 5 + index)
        assert scheduler.kv_cache.usage == 0.0

    # B048
    def test_an_urgent_request_that_finds_every_row_taken_is_the_next_to_start(self) -> None:
        driver = Driver(make_scheduler(max_num_requests=1, policy="priority"))
        driver.scheduler.add(make_request("running", 3))
        driver.step()
        for name, priority in (("idle", 5), ("normal", 0), ("later", 0), ("urgent", -1)):
            driver.scheduler.add(make_request(name, 3, priority=priority))
        driver.run()
        admitted = [new.request_id for plan in driver.plans for new in plan.new_requests]
        assert admitted == ["running", "urgent", "normal", "later", "idle"]


class TestPrefixSharing:
    def test_copies_of_a_prompt_compute_it_once_even_in_one_step(self) -> None:
        for token_budget in (8192, 512):
            scheduler = make_scheduler(1024, 16, token_budget=token_budget, max_model_len=4096)
            driver = Driver(scheduler)
            for index in range(8):
                scheduler.add(make_request(f"r{index}", list(range(2000)), max_tokens=1))
            driver.run()
            assert driver.worker.num_computed <= 1.1 * 2000
            cached = [updates[0].num_cached_tokens for updates in driver.updates.values()]
            assert cached == [0] + [1984] * 7
            outputs = list(driver.token_ids.values())
            assert outputs == [expected_output(range(2000), 1)] * 8

    def test_copies_in_chunks_share_the_work_instead_of_repeating_it(self) -> None:
        for threshold, token_budget in ((128, 512), (128, 2048), (500, 2048), (128, 384)):
            scheduler = make_scheduler(
                1024,
                16,
                token_budget=token_budget,
                max_model_len=4096,
                long_prefill_token_threshold=threshold,
            )
            driver = Driver(scheduler)
            for index in range(8):
                scheduler.add(make_request(f"r{index}", list(range(2000)), max_tokens=1))
            driver.run()
            assert driver.worker.num_computed <= 1.1 * 2000
            outputs = list(driver.token_ids.values())
            assert outputs == [expected_output(range(2000), 1)] * 8

    def test_a_request_admitted_now_hits_what_a_running_one_writes_now(self) -> None:
        driver = Driver(make_scheduler(token_budget=30))
        prompt = list(range(40))
        driver.scheduler.add(make_request("a", prompt))
        driver.step()
        driver.scheduler.add(make_request("b", prompt))
        driver.step()  # a computes its last ten tokens, b shares nine blocks with it
        assert driver.plans[1].num_scheduled_tokens == {"a": 10, "b": 4}
        driver.run()
        assert driver.token_ids["b"] == driver.token_ids["a"] == expected_output(prompt, 4)

    # B028
    def test_fully_cached_prompts_still_compute_a_token(self) -> None:
        driver = Driver(make_scheduler(64, 16, max_num_requests=4))
        for length in (15, 16, 17, 32, 48):
            prompt = list(range(length))
            for turn in range(3):
                driver.scheduler.add(make_request(f"{length}-{turn}", prompt, max_tokens=5))
                driver.run()
            for turn in (3, 4, 5):
                driver.scheduler.add(make_request(f"{length}-{turn}", prompt, max_tokens=5))
            driver.run()
            for turn in range(6):
                name = f"{length}-{turn}"
                assert driver.token_ids[name] == expected_output(prompt, 5)
                num_cached = driver.updates[name][0].num_cached_tokens
                assert num_cached is not None
                assert num_cached <= length - 1
                assert turn == 0 or num_cached == (length - 1) // 16 * 16

    # B038
    @pytest.mark.parametrize("block_size", [16, 256])
    @pytest.mark.parametrize("delay", [0, 1, 5])
    def test_a_prompt_may_share_a_live_prefix(self, block_size: int, delay: int) -> None:
        first = list(range(300))
        for second in (first, first[:160] + [7] * 20):
            driver = Driver(
                make_scheduler(2048 // block_size, block_size, token_budget=512, max_model_len=1024)
            )
            driver.scheduler.add(make_request("1", first, max_tokens=40))
            for _ in range(delay):
                driver.step()
            driver.scheduler.add(make_request("2", second, max_tokens=40))
            driver.run()
            assert driver.token_ids["1"] == expected_output(first, 40)
            assert driver.token_ids["2"] == expected_output(second, 40)
            shared = 300 - 1 if second is first else 160
            assert driver.updates["2"][0].num_cached_tokens == shared // block_size * block_size

    # B039
    def test_block_borders_are_exact_over_two_turns(self) -> None:
        for length in range(1, 35):
            driver = Driver(make_scheduler(64, 16))
            prompt = [length * 100 + index for index in range(length)]
            for name in ("first", "again"):
                driver.scheduler.add(make_request(name, prompt, max_tokens=20))
                driver.run()
                assert driver.token_ids[name] == expected_output(prompt, 20)
            second = prompt + driver.token_ids["first"] + [1, 2, 3, 4, 5]
            driver.scheduler.add(make_request("turn 2", second, max_tokens=20))
            driver.run()
            assert driver.token_ids["turn 2"] == expected_output(second, 20)
            # The last token of turn 1 was never computed.
            num_cached = driver.updates["turn 2"][0].num_cached_tokens
            assert num_cached == (length + 20 - 1) // 16 * 16

    def test_statistics_count_prefix_hits(self) -> None:
        driver = Driver(make_scheduler())
        for name in "ab":
            driver.scheduler.add(make_request(name, list(range(10))))
            driver.run()
        stats = driver.scheduler.stats()
        assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (20, 8)


class TestAbort:
    def test_a_waiting_request_was_never_seen_by_the_worker(self) -> None:
        driver = Driver(make_scheduler(max_num_requests=1))
        driver.scheduler.add(make_request("a", 3))
        driver.scheduler.add(make_request("b", 3))
        driver.step()
        [update] = driver.scheduler.abort(["b"])
        assert (update.request_id, update.finish_reason) == ("b", FinishReason.ABORT)
        assert update.first_scheduled_time is None
        driver.run()
        assert all("b" not in plan.finished_request_ids for plan in driver.plans)

    def test_a_running_request_gives_back_its_blocks_and_its_row_once(self) -> None:
        driver = Driver(make_scheduler())
        driver.scheduler.add(make_request("a", 3, max_tokens=50))
        driver.scheduler.add(make_request("b", 3, max_tokens=5))
        driver.step()
        [update] = driver.scheduler.abort(["a", "a"])
        assert (update.new_token_ids, update.finish_reason) == ([], FinishReason.ABORT)
        check_invariants(driver.scheduler)
        driver.run()
        assert "a" not in driver.worker.rows
        assert sum(plan.finished_request_ids.count("a") for plan in driver.plans) == 1

    def test_unknown_and_finished_ids_are_ignored(self) -> None:
        driver = Driver(make_scheduler())
        driver.scheduler.add(make_request("a", 3))
        driver.run()
        assert driver.scheduler.abort(["a", "nobody"]) == []

    def test_a_preempted_request_is_not_forgotten_twice(self) -> None:
        driver = Driver(make_scheduler(4, 4))
        for name in "ab":
            driver.scheduler.add(make_request(name, 7, max_tokens=9))
        while not driver.scheduler.stats().num_preemptions:
            driver.step()
        driver.collect(driver.scheduler.abort(["b"]))
        driver.run()
        assert sum(plan.preempted_request_ids.count("b") for plan in driver.plans) == 1
        assert sum(plan.finished_request_ids.count("b") for plan in driver.plans) == 0

    def test_the_output_of_a_request_aborted_meanwhile_is_dropped(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 9))
        plan = scheduler.schedule(0.0)
        scheduler.abort(["a"])
        scheduler.add(make_request("a", 5))  # the id is free: this one must not get that output
        assert scheduler.update_from_output(plan, answer(plan, a=[7])) == []
        check_invariants(scheduler)
        plan = scheduler.schedule(0.0)
        assert plan.finished_request_ids == ["a"]
        assert [new.request_id for new in plan.new_requests] == ["a"]
        [update] = scheduler.update_from_output(plan, answer(plan, a=[8]))
        assert update.new_token_ids == [8]

    def test_blocks_in_flight_at_an_abort_are_not_found_afterwards(self) -> None:
        scheduler = make_scheduler(token_budget=9)
        scheduler.add(make_request("a", list(range(17))))
        plan = scheduler.schedule(0.0)
        scheduler.update_from_output(plan, answer(plan))
        plan = scheduler.schedule(0.0)
        probe = make_request("probe", list(range(20)))
        assert scheduler.kv_cache.match_prefix(probe).num_tokens == 16
        scheduler.abort(["a"])
        assert scheduler.kv_cache.match_prefix(probe).num_tokens == 8
        scheduler.update_from_output(plan, answer(plan, a=[7]))
        check_invariants(scheduler)

    def test_ten_thousand_waiting_requests_can_be_aborted_at_once(self) -> None:
        for policy in ("fcfs", "priority"):
            scheduler = make_scheduler(policy=policy)
            for index in range(10_000):
                scheduler.add(make_request(str(index), [1]))
            ids = [str(index) for index in reversed(range(10_000))]
            assert len(scheduler.abort(ids)) == 10_000
            assert not scheduler.has_work


class TestErrors:
    def test_a_failed_request_ends_alone_and_its_blocks_are_forgotten(self) -> None:
        scheduler = make_scheduler()
        prompt = list(range(9))
        for name, tokens in (("bad", prompt), ("good", [50, 51])):
            scheduler.add(make_request(name, tokens))
        plan = scheduler.schedule(0.0)
        output = answer(plan, good=[7])
        output.errors["bad"] = "NaN in logits"
        bad, good = scheduler.update_from_output(plan, output)
        assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "NaN in logits")
        assert (good.finish_reason, good.new_token_ids) == (None, [7])
        assert scheduler.kv_cache.match_prefix(make_request("probe", prompt)).num_tokens == 0
        check_invariants(scheduler)
        assert scheduler.schedule(0.0).finished_request_ids == ["bad"]

    def test_blocks_of_earlier_steps_are_forgotten_too(self) -> None:
        scheduler = make_scheduler(token_budget=8)
        prompt = list(range(12))
        scheduler.add(make_request("bad", prompt))
        plan = scheduler.schedule(0.0)
        scheduler.update_from_output(plan, answer(plan))
        probe = make_request("probe", prompt)
        assert scheduler.kv_cache.match_prefix(probe).num_tokens == 8
        plan = scheduler.schedule(0.0)
        output = answer(plan)
        output.errors["bad"] = "NaN in logits"  # which may have been there before it was seen
        scheduler.update_from_output(plan, output)
        assert scheduler.kv_cache.match_prefix(probe).num_tokens == 0

    def test_a_request_that_shared_the_broken_blocks_keeps_running_if_it_can(self) -> None:
        scheduler = make_scheduler()
        prompt = list(range(9))
        for name in ("bad", "sharer"):
            scheduler.add(make_request(name, prompt))
        plan = scheduler.schedule(0.0)
        assert plan.num_computed_tokens["sharer"] == 8
        output = answer(plan, sharer=[7])
        output.errors["bad"] = "the sampler failed"
        scheduler.update_from_output(plan, output)
        check_invariants(scheduler)
        assert scheduler.schedule(0.0).num_scheduled_tokens == {"sharer": 1}


class TestReports:
    def test_of_the_chunks_of_a_prompt_only_the_first_is_news(self) -> None:
        driver = Driver(make_scheduler(token_budget=4))
        driver.scheduler.add(make_request("a", 10))
        [begun] = driver.step()
        assert begun.new_token_ids == []
        assert driver.step() == []
        [update] = driver.step()
        assert len(update.new_token_ids) == 1

    def test_the_hit_is_told_until_the_first_token_and_the_time_of_the_first_step_once(
        self,
    ) -> None:
        driver = Driver(make_scheduler(token_budget=6, max_num_requests=1))
        driver.scheduler.add(make_request("a", 10, max_tokens=2))
        driver.scheduler.add(make_request("b", 3, max_tokens=2))
        driver.run()
        told = {
            name: [(u.num_cached_tokens, u.first_scheduled_time) for u in updates]
            for name, updates in driver.updates.items()
        }
        assert told == {"a": [(0, 0.0), (0, None), (None, None)], "b": [(0, 3.0), (None, None)]}

    def test_logprobs_come_with_their_tokens(self) -> None:
        driver = Driver(make_scheduler())
        driver.scheduler.add(make_request("a", 3, logprobs=0))
        driver.run()
        for index, update in enumerate(driver.updates["a"]):
            assert update.logprobs == make_logprobs(update.new_token_ids, 3 + index)

    def test_prompt_logprobs_come_once_each_though_the_prompt_is_computed_twice(self) -> None:
        driver = Driver(make_scheduler(6, 4, token_budget=8))
        driver.scheduler.add(make_request("a", 9, max_tokens=14))
        b = make_request("b", 10, max_tokens=10, prompt_logprobs=0)
        driver.scheduler.add(b)
        driver.run()
        assert b.num_preemptions > 0
        parts = [u.prompt_logprobs for u in driver.updates["b"] if u.prompt_logprobs is not None]
        assert len(parts) > 1
        whole = make_logprobs(b.token_ids[1:10], 1)
        assert [t for part in parts for t in part.token_ids] == whole.token_ids
        assert [p for part in parts for p in part.logprobs] == whole.logprobs
        assert [r for part in parts for r in part.ranks] == whole.ranks

    def test_prompt_logprobs_are_cut_where_a_preempted_chunk_repeats(self) -> None:
        scheduler = make_scheduler(token_budget=6)
        request = make_request("a", 10, prompt_logprobs=0)
        scheduler.add(request)
        plan = scheduler.schedule(0.0)
        output = answer(plan)
        output.prompt_logprobs["a"] = make_logprobs(request.token_ids[1:7], 1)
        scheduler.update_from_output(plan, output)
        scheduler._preempt(scheduler.running.pop())
        scheduler.budget.num_tokens = 8  # the second time the chunks are other ones
        scheduler.budget.chunk_cap = 8
        plan = scheduler.schedule(0.0)
        assert plan.num_computed_tokens == {"a": 0}
        output = answer(plan)
        output.prompt_logprobs["a"] = make_logprobs(request.token_ids[1:9], 1)
        [update] = scheduler.update_from_output(plan, output)
        assert update.prompt_logprobs == make_logprobs(request.token_ids[7:9], 7)

    # B052: different lengths in one batch, and equal prompts, do not mix.
    def test_every_request_gets_its_own_number_of_tokens(self) -> None:
        driver = Driver(make_scheduler())
        max_tokens = [50, 1, 20, 1, 5]
        for index, limit in enumerate(max_tokens):
            driver.scheduler.add(make_request(f"r{index}", [index // 2] * 6, max_tokens=limit))
        driver.run()
        for index, limit in enumerate(max_tokens):
            expected = expected_output([index // 2] * 6, limit)
            assert driver.token_ids[f"r{index}"] == expected
            assert driver.finish_reason(f"r{index}") is FinishReason.LENGTH


class TestPlans:
    def test_a_plan_is_not_changed_by_what_happens_later(self) -> None:
        driver = Driver(make_scheduler())
        driver.scheduler.add(make_request("a", [1, 2, 3]))
        driver.step()
        driver.step()
        [new] = driver.plans[0].new_requests
        assert new.token_ids == [1, 2, 3]
        assert len(new.block_ids) == 1

    def test_without_work_a_plan_is_empty_and_rows_are_forgotten_with_the_next_full_one(
        self,
    ) -> None:
        driver = Driver(make_scheduler())
        driver.scheduler.add(make_request("a", 3, max_tokens=1))
        driver.step()
        assert not driver.scheduler.has_work
        plan = driver.scheduler.schedule(0.0)
        assert plan.is_empty
        assert plan.finished_request_ids == []
        driver.scheduler.add(make_request("b", 3))
        driver.step()
        assert driver.plans[-1].finished_request_ids == ["a"]

    def test_each_plan_must_be_answered_before_the_next_but_one_and_in_full(self) -> None:
        scheduler = make_scheduler()
        scheduler.add(make_request("a", 3))
        plan, ahead = scheduler.schedule(0.0), scheduler.schedule(0.0)
        with pytest.raises(AssertionError, match="step 1 has had no update"):
            scheduler.schedule(0.0)
        with pytest.raises(AssertionError, match="2 is not the oldest"):
            scheduler.update_from_output(ahead, answer(ahead, a=[7]))
        with pytest.raises(AssertionError, match="not every request was answered"):
            scheduler.update_from_output(plan, StepOutput([], [], [], []))
        with pytest.raises(AssertionError, match="sampled"):
            scheduler.update_from_output(plan, answer(plan))  # it reached the end of its tokens

    def test_new_blocks_are_listed_once_and_only_for_rows_the_worker_knows(self) -> None:
        driver = Driver(make_scheduler(block_size=2))
        driver.scheduler.add(make_request("a", 3, max_tokens=5))
        driver.run()
        grown = [plan.new_block_ids.get("a", []) for plan in driver.plans]
        assert [len(block_ids) for block_ids in grown] == [0, 0, 1, 0, 1]
