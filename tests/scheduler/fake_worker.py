"""A worker without a model: it follows the step contract, and its KV cache is a dict.

Each slot of `memory` holds a fingerprint of every token up to that position, which is what real
KV depends on. A step writes its slots, then reads all slots of each request: a stale, foreign or
lost block shows at once. The next token is a function of the fingerprint, so that a request's
output must be the same however it was scheduled: `expected_output` computes it alone.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nano.device import HostTransfers
from nano.model_input.device_drafts import DeviceDrafts, DraftTable
from nano.model_input.own_drafts import DraftIds, OwnDrafts
from nano.outputs import FinishReason, TokenOutput
from nano.scheduler.draft_planner import DraftPlanner
from nano.scheduler.draft_policy import DraftPolicy
from nano.scheduler.invariants import check_invariants
from nano.scheduler.scheduler import Scheduler
from nano.speculation import ProposerInfo
from nano.step import NewRequest, StepOutput, StepPlan, TokenLogprobs

VOCAB_SIZE = 40
EOS = 0
NAN = -1  # a fingerprint no token has
JUNK = "junk"  # the only proposer


def draft_planner(num_draft_tokens: int) -> DraftPlanner | None:
    """Always asks for so many drafts, and verifies all of them."""
    if not num_draft_tokens:
        return None
    infos = [ProposerInfo(JUNK, num_draft_tokens, is_free=True)]
    return DraftPlanner(infos, DraftPolicy(infos, [(1, 1.0)], is_static=True))


def fingerprint(parent: int, token_id: int) -> int:
    return hash((parent, token_id)) & 0xFFFFFFFF


def extend(fingerprints: list[int], token_ids: Sequence[int]) -> None:
    """Append the fingerprints of the tokens that have none yet."""
    for token_id in token_ids[len(fingerprints) :]:
        fingerprints.append(fingerprint(fingerprints[-1] if fingerprints else 1, token_id))


def next_token(fingerprint: int) -> int:
    return (fingerprint >> 8) % VOCAB_SIZE


def expected_output(prompt: Sequence[int], num_tokens: int, stops: Sequence[int] = ()) -> list[int]:
    """The request computed alone: up to a stop or `num_tokens` tokens."""
    token_ids, fingerprints = list(prompt), []
    while len(token_ids) < len(prompt) + num_tokens:
        extend(fingerprints, token_ids)
        token_ids.append(next_token(fingerprints[-1]))
        if token_ids[-1] in stops:
            break
    return token_ids[len(prompt) :]


@dataclass
class Row:
    new: NewRequest
    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    fingerprints: list[int]


class FakeWorker:
    """Executes plans and asserts that each can be executed.

    num_draft_tokens   most drafts made of those that a plan asks for, each right with probability
    draft_accuracy
    error_rate         chance that a request of a step computes NaN
    hides_drafts       of half of the drafts made, the core is told no more than how many there are
    """

    def __init__(
        self,
        block_size: int,
        *,
        num_draft_tokens: int = 0,
        draft_accuracy: float = 0.6,
        error_rate: float = 0.0,
        hides_drafts: bool = False,
        seed: int = 0,
    ):
        self.block_size = block_size
        self.num_draft_tokens = num_draft_tokens
        self.draft_accuracy = draft_accuracy
        self.error_rate = error_rate
        self.random = random.Random(seed)
        self.rows: dict[str, Row] = {}
        self.memory: dict[int, int] = {}
        self.num_computed = 0  # tokens, over all steps
        self.hides_drafts = hides_drafts
        self.own_drafts = OwnDrafts(shows_all=not hides_drafts)
        self.failed: set[str] = set()  # in the last step

    def execute(self, plan: StepPlan) -> StepOutput:
        own = self.own_drafts.fill_in(plan)
        unverified, plan = self.own_drafts.read(own), own.plan
        if own.unread:
            plan.draft_token_ids.update((r, own.verified[r]) for r in own.unread)
        self._apply(plan)
        broken = {r for r in plan.num_scheduled_tokens if self.random.random() < self.error_rate}
        failed, self.failed = self.failed, set()
        for request_id in plan.num_scheduled_tokens:
            if request_id in failed:  # a plan ahead has it still, and others may read its slots
                self._spoil(plan, request_id)
            else:
                self._write(plan, request_id, request_id in broken)
        output = StepOutput([], [], [], [], own.verified, unverified)
        made: list[DraftIds] = []
        fresh = {new.request_id for new in plan.new_requests} | self.extended
        for request_id in plan.num_scheduled_tokens:
            token_ids, drafts = [], []
            if request_id in failed or self._reads_nan(plan, request_id):
                known = broken | fresh | failed
                assert request_id in known, f"{request_id} was given broken KV"
                self.failed.add(request_id)
                self.rows[request_id].num_computed_tokens += plan.num_scheduled_tokens[request_id]
                output.errors[request_id] = "NaN in logits"
            else:
                token_ids = self._sample(plan, request_id, output)
                drafts = self._propose(plan, request_id) if token_ids else []
            output.request_ids.append(request_id)
            output.token_ids.append(token_ids)
            is_hidden = self.hides_drafts and self.random.random() < 0.5
            made.append(on_device(drafts) if is_hidden else drafts)
            output.draft_sources.append(JUNK if drafts else "")
        output.draft_token_ids = self.own_drafts.keep(output.request_ids, made)
        return output

    def _apply(self, plan: StepPlan) -> None:
        self.extended: set[str] = set()
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            del self.rows[request_id]  # KeyError: never seen, or forgotten twice
        for new in plan.new_requests:
            assert new.request_id not in self.rows, f"{new.request_id} has a row"
            self.rows[new.request_id] = Row(
                new, list(new.token_ids), new.num_computed_tokens, list(new.block_ids), []
            )
        for request_id, block_ids in plan.new_block_ids.items():
            assert block_ids
            self.rows[request_id].block_ids += block_ids
        for request_id, num_computed in plan.num_computed_tokens.items():
            row = self.rows[request_id]
            assert row.num_computed_tokens <= num_computed
            if row.num_computed_tokens < num_computed:  # it reads what others computed
                row.num_computed_tokens = num_computed
                self.extended.add(request_id)

    def _slot(self, row: Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def _write(self, plan: StepPlan, request_id: str, is_broken: bool) -> None:
        row, drafts = self.rows[request_id], plan.draft_token_ids.get(request_id, [])
        num_scheduled = plan.num_scheduled_tokens[request_id]
        assert num_scheduled > 0
        start, stop = row.num_computed_tokens, row.num_computed_tokens + num_scheduled
        if drafts:
            assert stop == len(row.token_ids) + len(drafts), "drafts follow every known token"
        assert stop <= len(row.token_ids) + len(drafts)
        self.num_computed += num_scheduled
        extend(row.fingerprints, row.token_ids)
        fingerprints = row.fingerprints.copy()
        extend(fingerprints, row.token_ids + drafts)
        for position in range(start, stop):
            self.memory[self._slot(row, position)] = NAN if is_broken else fingerprints[position]

    def _spoil(self, plan: StepPlan, request_id: str) -> None:
        row = self.rows[request_id]
        start = row.num_computed_tokens
        for position in range(start, start + plan.num_scheduled_tokens[request_id]):
            self.memory[self._slot(row, position)] = NAN

    def _reads_nan(self, plan: StepPlan, request_id: str) -> bool:
        """Check every slot that the request attends to; True if one holds NaN."""
        row, size = self.rows[request_id], self.block_size
        stop = row.num_computed_tokens + plan.num_scheduled_tokens[request_id]
        stop = min(stop, len(row.token_ids))
        memory, block_ids = self.memory, row.block_ids
        found = [memory[block_ids[p // size] * size + p % size] for p in range(stop)]
        if NAN in found:
            return True
        assert found == row.fingerprints[:stop], f"{request_id} reads foreign or stale KV"
        return False

    def _sample(self, plan: StepPlan, request_id: str, output: StepOutput) -> list[int]:
        row, drafts = self.rows[request_id], plan.draft_token_ids.get(request_id, [])
        start = row.num_computed_tokens
        stop = start + plan.num_scheduled_tokens[request_id]
        params = row.new.sampling_params
        if params.prompt_logprobs is not None:
            known = row.token_ids[start + 1 : min(stop + 1, row.new.num_prompt_tokens)]
            if known:
                output.prompt_logprobs[request_id] = make_logprobs(known, start + 1)
        if stop < len(row.token_ids):
            row.num_computed_tokens = stop
            return []
        token_ids: list[int] = []
        for draft in [*drafts, None]:
            token_ids.append(next_token(row.fingerprints[-1]))
            row.token_ids.append(token_ids[-1])
            extend(row.fingerprints, row.token_ids)
            if token_ids[-1] != draft:
                break
        row.num_computed_tokens = len(row.token_ids) - 1
        if params.logprobs is not None:
            position = len(row.token_ids) - len(token_ids)
            output.logprobs[request_id] = make_logprobs(token_ids, position)
        return token_ids

    def _propose(self, plan: StepPlan, request_id: str) -> list[int]:
        drafts: list[int] = []
        asked = plan.draft_requests.get(request_id, ())
        most = min(self.num_draft_tokens, max((one.num_tokens for one in asked), default=0))
        parent = self.rows[request_id].fingerprints[-1]
        for _ in range(self.random.randint(0, most)):
            is_right = self.random.random() < self.draft_accuracy
            drafts.append(next_token(parent) if is_right else self.random.randrange(VOCAB_SIZE))
            parent = fingerprint(parent, drafts[-1])
        return drafts


def on_device(token_ids: list[int]) -> DeviceDrafts:
    table = torch.tensor([token_ids], dtype=torch.int64)
    return DeviceDrafts(DraftTable(HostTransfers(), table), 0, len(token_ids))


def make_logprobs(token_ids: Sequence[int], position: int) -> TokenLogprobs:
    """Logprobs that say which token and position they are of."""
    return TokenLogprobs(
        [[token_id] for token_id in token_ids],
        [[-float(position + index)] for index in range(len(token_ids))],
        [1] * len(token_ids),
    )


class Driver:
    """Runs a scheduler against a FakeWorker and collects what each request was told.

    num_ahead   plans that are made before the output of the one before is known: 0 or 1
    """

    def __init__(self, scheduler: Scheduler, worker: FakeWorker | None = None, num_ahead: int = 0):
        self.num_ahead = num_ahead
        self.in_flight: deque[StepPlan] = deque()
        self.scheduler = scheduler
        self.worker = worker or FakeWorker(scheduler.kv_cache.block_size)
        self.plans: list[StepPlan] = []
        self.token_ids: dict[str, list[int]] = {}
        self.updates: dict[str, list[TokenOutput]] = {}

    def step(self) -> list[TokenOutput]:
        plan = self.scheduler.schedule(now=float(len(self.plans)))
        check_invariants(self.scheduler)
        assert plan.num_tokens <= self.scheduler.budget.num_tokens, "the token budget is exceeded"
        if not plan.is_empty:
            self.plans.append(plan)
            self.in_flight.append(plan)
        if not plan.is_empty and len(self.in_flight) <= self.num_ahead:
            return []
        assert self.in_flight, "work, but nothing was scheduled"
        oldest = self.in_flight.popleft()
        updates = self.scheduler.update_from_output(oldest, self.worker.execute(oldest))
        check_invariants(self.scheduler)
        self.collect(updates)
        return updates

    def collect(self, updates: list[TokenOutput]) -> None:
        for update in updates:
            earlier = self.updates.setdefault(update.request_id, [])
            assert not (earlier and earlier[-1].finish_reason), f"{update.request_id} ended before"
            earlier.append(update)
            self.token_ids.setdefault(update.request_id, []).extend(update.new_token_ids)

    def run(self, max_steps: int = 2000) -> None:
        """Step until there is no work."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def finish_reason(self, request_id: str) -> FinishReason | None:
        return self.updates[request_id][-1].finish_reason
