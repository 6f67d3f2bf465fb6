"""Scheduler: which tokens each step computes, and what their results mean. Torch-free.

There is no phase. A prompt chunk, a resumed prompt, a decode token and its drafts are all tokens
that a request has and whose KV is not computed yet. Owns every `Request`; reads no clock.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from nano.errors import InvalidRequest
from nano.kv_cache.kv_cache_manager import KVCacheManager, PrefixHit
from nano.outputs import FinishReason, TokenOutput
from nano.scheduler.draft_planner import DraftPlanner
from nano.scheduler.draft_policy import DraftPolicy
from nano.scheduler.report import new_prompt_logprobs, report, slice_logprobs
from nano.scheduler.request import InFlight, Request, RequestStatus
from nano.scheduler.request_queue import Policy, make_request_queue
from nano.scheduler.step_time import StepLoad
from nano.scheduler.token_budget import TokenBudget
from nano.step import DRAFT_ON_DEVICE, NewRequest, StepOutput, StepPlan

by_urgency = attrgetter("urgency")


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot; the last three only ever grow."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # share of blocks held by requests, 0 to 1
    num_preemptions: int
    num_prefix_query_tokens: int  # known tokens of admitted requests
    num_prefix_hit_tokens: int  # of those, read from the prefix cache


class Scheduler:
    """Decides each step under a token budget, and applies each step's output.

    `schedule`, then `update_from_output` with that plan, in turns; or one plan ahead, so that there
    are two before the first output. `add` and `abort` come at any moment. The running requests are
    served before the waiting ones and in order: by admission under "fcfs", by urgency under
    "priority". Whoever needs blocks that are not there takes them from the last in that order, so
    the first always makes progress and a victim has never been scheduled already in the same step.
    A preempted request computes its KV again, less what the prefix cache still has.

    A plan that is one ahead takes each request for as far as the step before may bring it. The
    token that step samples, and the drafts that it makes, stay with the worker: the plan has
    placeholders for them, as many as there can be. What turns out to be of no use, since the
    request has ended or was preempted, is dropped when it comes.

    token_budget                  most tokens per step
    max_num_requests              most requests running at once
    max_model_len                 most tokens of one request, prompt and output
    long_prefill_token_threshold  most tokens per step of a request that has more than one known
                                  token to compute; 0: no such cap
    costly_context                context at which attending costs a token as much as all else.
                                  Chunks of prompts then take of the budget what they cost, so
                                  that a step takes as long at any context; None: a token is one
    drafts                        decides about speculation; None: there is none
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        token_budget: int,
        max_num_requests: int,
        policy: Policy = "fcfs",
        long_prefill_token_threshold: int = 0,
        costly_context: int | None = None,
        drafts: DraftPlanner | None = None,
    ):
        assert max_num_requests >= 1, f"max_num_requests must be at least 1, got {max_num_requests}"
        self.kv_cache = kv_cache
        self.max_model_len = max_model_len
        self.budget = TokenBudget(
            token_budget, kv_cache.block_size, long_prefill_token_threshold, costly_context
        )
        self.max_num_requests = max_num_requests
        self.policy = policy
        self.drafts = drafts or DraftPlanner((), DraftPolicy((), ((1, 1.0),)))

        self.requests: dict[str, Request] = {}  # running and waiting
        self.waiting = make_request_queue(policy)
        self.running: list[Request] = []  # whoever comes first is served first
        self._scheduled: dict[str, tuple[Request, InFlight]] = {}  # in the plan being made
        # (step, whose it is), by plan
        self._in_flight: deque[tuple[int, dict[str, tuple[Request, InFlight]]]] = deque()
        self._rows_to_forget: list[str] = []
        self._preempted_rows: list[str] = []
        self._step = 0
        self._num_arrivals = 0
        self._num_preemptions = 0
        self._num_prefix_query_tokens = 0
        self._num_prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether anybody waits for tokens."""
        return bool(self.requests)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.kv_cache.usage,
            num_preemptions=self._num_preemptions,
            num_prefix_query_tokens=self._num_prefix_query_tokens,
            num_prefix_hit_tokens=self._num_prefix_hit_tokens,
        )

    def add(self, request: Request) -> None:
        """Queue a new request. Raises InvalidRequest, and changes nothing, if it can never run."""
        num_tokens = request.num_prompt_tokens
        if request.request_id in self.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
        if num_tokens == 0:
            raise InvalidRequest("the prompt must have at least 1 token, got 0", "prompt")
        for limit, name in (
            (self.max_model_len, "max_model_len"),
            (self.kv_cache.num_slots, "the capacity of the KV cache"),
        ):
            if num_tokens + 1 > limit:
                raise InvalidRequest(
                    f"a prompt of {num_tokens} tokens and 1 token of output exceed "
                    f"{name}, {limit} tokens",
                    "prompt",
                )
        # One limit stands for three. With the capacity in it, a request that is alone always
        # fits: it ends with `length` when the cache is full, instead of preempting itself.
        request.max_num_tokens = min(self.max_model_len, self.kv_cache.num_slots)
        max_tokens = request.sampling_params.max_tokens
        if max_tokens is not None:
            request.max_num_tokens = min(request.max_num_tokens, num_tokens + max_tokens)
        request.arrival_index = self._num_arrivals
        self._num_arrivals += 1
        self.drafts.admit(request)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[TokenOutput]:
        """End requests now, also those being computed. Unknown and finished ids are ignored."""
        updates = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                request.finish_reason = reason
                self._finish(request)
                updates.append(report(request, []))
        self._drop_finished()
        return updates

    def schedule(self, now: float) -> StepPlan:
        """The next step. `now` is the caller's clock in seconds, for `first_scheduled_time`.

        The plan is empty if there is no work, or none before the output of the step in flight.
        Rows to forget wait for a plan that is not.
        """
        assert len(self._in_flight) <= 1, f"step {self._step - 1} has had no update_from_output"
        self._step += 1
        plan = StepPlan(self._step)
        num_preemptions = self._num_preemptions
        if self.drafts.has_proposers:
            self.drafts.trim(self.running, self._known_load())
        budget = self._schedule_running(plan, self.budget.num_tokens)
        if self._num_preemptions == num_preemptions:  # never admit while evicting
            self._admit_waiting(plan, budget, now)
        if not plan.is_empty:
            plan.finished_request_ids, self._rows_to_forget = self._rows_to_forget, []
            plan.preempted_request_ids, self._preempted_rows = self._preempted_rows, []
            if self.drafts.has_proposers:
                requests = [request for request, _ in self._scheduled.values()]
                self.drafts.ask(plan, requests, self._known_load(plan))
            self._take_off(plan)
        return plan

    def _take_off(self, plan: StepPlan) -> None:
        """The plan is made, and its requests are in flight with it."""
        scheduled, self._scheduled = self._scheduled, {}
        for request_id, asks in plan.draft_requests.items():
            if asks:
                part = scheduled[request_id][1]
                part.num_asked = max(ask.num_tokens for ask in asks)
                part.draft_source = asks[0].proposer
        for request, part in scheduled.values():
            request.in_flight.append(part)
        self._in_flight.append((plan.step, scheduled))

    def _known_load(self, plan: StepPlan | None = None) -> StepLoad:
        """What the next step has to do, as far as can be told: after `plan`, if any."""
        scheduled = {} if plan is None else plan.num_scheduled_tokens
        budget = self.budget.num_tokens
        num_tokens = num_outputs = 0
        for request in self.running:
            num_computed = request.num_planned_computed_tokens
            num_computed += scheduled.get(request.request_id, 0)
            num_tokens += max(1, request.num_planned_tokens - num_computed)
            num_outputs += num_tokens <= budget
        if self.waiting and len(self.running) < self.max_num_requests:
            num_tokens += self.waiting.peek().num_tokens
        return StepLoad(min(num_tokens, budget), max(1, num_outputs))

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        """Plan the running requests; returns the budget that is left."""
        num_served = 0
        while num_served < len(self.running) and budget:
            request = self.running[num_served]
            num_served += 1
            # One token of the budget is kept for each request behind, so that no stream stalls
            # while a long prompt, or many drafts, run ahead of it.
            share = max(1, budget - (len(self.running) - num_served))
            num_computed = request.num_planned_computed_tokens
            num_known = request.num_planned_tokens
            shared_ids: list[int] = []
            if num_known - num_computed > 1:  # one is to be computed anyway
                shared_ids = self._extend_prefix(request)
                num_computed += len(shared_ids) * self.kv_cache.block_size
            num_tokens = self.budget.num_tokens_of(request, num_computed, num_known, share)
            if not num_tokens:
                continue  # the step in flight may be its last
            block_ids = self.kv_cache.allocate(request, num_tokens)
            if block_ids is None and request.num_planned_drafts:
                num_tokens = 1  # a guess is not worth a preemption
                block_ids = self.kv_cache.allocate(request, num_tokens)
            if block_ids is None:
                block_ids = self._allocate_by_preemption(request, num_tokens)
                if block_ids is None:
                    break  # it was the last, and gave way itself
            if shared_ids or block_ids:
                plan.new_block_ids[request.request_id] = shared_ids + block_ids
            budget -= min(share, self.budget.cost(num_computed, num_known, num_tokens))
            self._put_in_plan(plan, request, num_computed, num_known, num_tokens)
        return budget

    def _extend_prefix(self, request: Request) -> list[int]:
        """Read on in the prefix cache."""
        block_ids = self.kv_cache.extend_prefix(request)
        self._count_hit(request, len(block_ids) * self.kv_cache.block_size)
        return block_ids

    def _admit_waiting(self, plan: StepPlan, budget: int, now: float) -> None:
        """Move waiting requests to running while tokens, rows and blocks last."""
        while self.waiting and budget and len(self.running) < self.max_num_requests:
            request = self.waiting.peek()
            hit = self.kv_cache.match_prefix(request)
            num_computed, num_known = hit.num_tokens, request.num_tokens
            num_tokens = self.budget.num_tokens_of(request, num_computed, num_known, budget)
            block_ids = self.kv_cache.allocate(request, num_tokens, hit)
            if block_ids is None:
                break
            self._start(self.waiting.pop(), hit, now)
            plan.new_requests.append(
                NewRequest(
                    request_id=request.request_id,
                    token_ids=request.token_ids.copy(),
                    num_prompt_tokens=request.num_prompt_tokens,
                    num_computed_tokens=hit.num_tokens,
                    block_ids=block_ids,
                    sampling_params=request.sampling_params,
                    eos_token_ids=request.eos_token_ids,
                    bad_words_token_ids=request.bad_words_token_ids,
                    cache_salt=request.cache_salt,
                    prediction_token_ids=request.prediction_token_ids,
                    proposers=request.proposers,
                    num_verifications=request.num_verifications,
                )
            )
            budget -= min(budget, self.budget.cost(num_computed, num_known, num_tokens))
            self._put_in_plan(plan, request, num_computed, num_known, num_tokens)

    def _put_in_plan(
        self, plan: StepPlan, request: Request, num_computed: int, num_known: int, num_tokens: int
    ) -> None:
        """The next `num_tokens` of a request that has so many known and computed by then."""
        request_id, in_flight = request.request_id, request.in_flight
        plan.num_scheduled_tokens[request_id] = num_tokens
        if not in_flight or not any(part.num_drafts for part in in_flight):  # else the worker knows
            plan.num_computed_tokens[request_id] = num_computed
        num_after = num_computed + num_tokens
        num_drafts = max(0, num_after - num_known)
        if num_drafts:
            drafts = [DRAFT_ON_DEVICE] * num_drafts if in_flight else request.draft_token_ids
            plan.draft_token_ids[request_id] = drafts[:num_drafts]
        # Blocks that this step fills can be hit from here on, in this very step.
        self.kv_cache.cache_blocks(request, min(num_after, len(request.token_ids)))
        part = InFlight(num_tokens, num_drafts, num_after >= num_known, request.num_preemptions)
        self._scheduled[request_id] = request, part

    def _allocate_by_preemption(self, request: Request, num_tokens: int) -> list[int] | None:
        """Evict from the end of `running` until `request` fits; None if it is evicted itself."""
        block_ids = None
        while block_ids is None:
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return None
            block_ids = self.kv_cache.allocate(request, num_tokens)
        return block_ids

    def _preempt(self, request: Request) -> None:
        assert request.request_id not in self._scheduled, f"{request.request_id} is scheduled"
        self._release(request)
        request.in_flight = []  # it will compute that again, and sample the same
        self._preempted_rows.append(request.request_id)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.put_back(request)

    def _start(self, request: Request, hit: PrefixHit, now: float) -> None:
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        self._num_prefix_query_tokens += request.num_tokens
        self._count_hit(request, hit.num_tokens)
        if self.policy == "priority":
            insort(self.running, request, key=by_urgency)
        else:
            self.running.append(request)

    def _count_hit(self, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens += num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens += num_tokens
        self._num_prefix_hit_tokens += num_tokens

    def update_from_output(self, plan: StepPlan, output: StepOutput) -> list[TokenOutput]:
        """Apply the output of `plan`, the oldest without; news of the requests that have any, in
        the plan's order.
        """
        oldest, in_flight = self._in_flight[0]
        assert plan.step == oldest, f"plan {plan.step} is not the oldest, {oldest}"
        assert len(output.request_ids) == len(in_flight), "not every request was answered"
        self._in_flight.popleft()
        updates = []
        has_finished = False
        for request_id, token_ids, draft_token_ids, source in zip(
            output.request_ids, output.token_ids, output.draft_token_ids, output.draft_sources
        ):
            request, part = in_flight[request_id]
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while it was computed
            if request.num_preemptions != part.num_preemptions:
                continue
            if request_id in output.errors:
                update = self._fail(request, output.errors[request_id])
            else:
                verified = output.verified_token_ids.get(request_id)
                if verified is None:
                    verified = plan.draft_token_ids.get(request_id, [])
                self._advance(request, part, verified, token_ids)
                num_kept = request.append(token_ids)
                draft = None
                if token_ids:
                    unverified = output.unverified_token_ids.get(request_id)
                    draft = self.drafts.take(
                        request, plan.step, verified, token_ids, num_kept, unverified
                    )
                self._note_drafts(request, draft_token_ids, source)
                num_valid = min(request.num_computed_tokens, len(request.token_ids))
                self.kv_cache.cache_blocks(request, num_valid)
                prompt_logprobs = new_prompt_logprobs(request, plan, output)
                if request.finish_reason is not None:
                    self._finish(request)
                elif not token_ids and prompt_logprobs is None and request.has_reported:
                    continue
                update = report(request, token_ids[:num_kept])
                update.prompt_logprobs = prompt_logprobs
                update.draft = draft
                logprobs = output.logprobs.get(request_id)
                if logprobs is not None:
                    update.logprobs = slice_logprobs(logprobs, 0, num_kept)
            updates.append(update)
            has_finished |= request.finish_reason is not None
        if has_finished:
            self._drop_finished()
        return updates

    def _advance(
        self, request: Request, part: InFlight, drafts: list[int], token_ids: list[int]
    ) -> None:
        """Count as computed what the step computed, less the drafts that were rejected.

        Afterwards a request that sampled has exactly one token without KV: the newest.
        """
        request_id = request.request_id
        num_computed = request.num_computed_tokens + part.num_tokens - part.num_drafts
        if token_ids:
            request.num_verifications += 1
            num_accepted = len(token_ids) - 1
            assert token_ids[:num_accepted] == drafts[:num_accepted], (
                f"{request_id}: drafts {drafts}, but accepted {token_ids[:num_accepted]}"
            )
            num_computed += num_accepted
        samples = num_computed >= len(request.token_ids)
        assert samples == bool(token_ids), f"{request_id}: sampled {token_ids}"
        request.num_computed_tokens = num_computed
        assert request.in_flight.pop(0) is part, f"{request_id}: outputs are out of order"

    def _note_drafts(self, request: Request, token_ids: list[int], source: str) -> None:
        """Keep the drafts that a step made, unless the next one is in flight and has them."""
        request.draft_source = source
        if not request.in_flight:
            request.draft_token_ids = token_ids

    def _fail(self, request: Request, error: str) -> TokenOutput:
        self.kv_cache.forget(request)  # nobody may read what it wrote, nor what it read
        request.finish_reason = FinishReason.ERROR
        self._finish(request)
        update = report(request, [])
        update.error = error
        return update

    def _finish(self, request: Request) -> None:
        """End a request that has its finish_reason. `_drop_finished` must follow."""
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request.request_id)
        else:
            self._release(request)
            self._rows_to_forget.append(request.request_id)
        request.status = RequestStatus.FINISHED
        self.drafts.forget(request)
        del self.requests[request.request_id]

    def _release(self, request: Request) -> None:
        """Take a running request's blocks."""
        # What the step in flight was to write is not known to be written.
        self.kv_cache.forget(request, request.num_computed_tokens)
        self.kv_cache.free(request)

    def _drop_finished(self) -> None:
        # One pass for all: removing them one by one is quadratic when many end together.
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
