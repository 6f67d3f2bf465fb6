"""DraftPlanner: the scheduler's half of speculation. Torch-free.

Which proposers a request may use, what is asked of them, which of their drafts are verified, and
what came of it. The decisions themselves are `DraftPolicy`'s; this owns the counts that callers and
operators see.
"""

from collections.abc import Iterable, Sequence

from nano.scheduler.draft_candidate import DraftCandidate
from nano.scheduler.draft_policy import DraftPolicy
from nano.scheduler.request import Request
from nano.scheduler.step_time import StepLoad, StepTiming
from nano.speculation import DraftRecord, ProposerInfo, SpeculationStats
from nano.step import StepOutput, StepPlan

_FEW_TOKENS = 64  # that an answer may be expected to have


class DraftPlanner:
    """Called by the scheduler once per step at each of its stages, in the order of the methods."""

    def __init__(self, proposers: Sequence[ProposerInfo], policy: DraftPolicy):
        self._infos = {info.name: info for info in proposers}
        self.policy = policy
        self.stats = SpeculationStats()  # of the engine since its start

    @property
    def has_proposers(self) -> bool:
        """Whether anybody guesses at all: if not, only `admit`, `take` and `forget` matter."""
        return bool(self._infos)

    def admit(self, request: Request) -> None:
        """Settle who may guess for a new request, and how much."""
        wishes = request.speculation
        names = self._infos if wishes.methods is None else wishes.methods
        if not wishes.enabled or wishes.num_tokens == 0:
            names = ()
        request.proposers = tuple(
            name
            for name in names
            if name in self._infos
            and (request.prediction_token_ids or not self._infos[name].needs_prediction)
        )
        caps = [self._infos[name].num_tokens for name in request.proposers]
        cap = max(caps, default=0)
        request.max_draft_tokens = cap if wishes.num_tokens is None else min(cap, wishes.num_tokens)

    def trim(self, running: Iterable[Request], load: StepLoad) -> None:
        """Cut drafts to what is worth verifying in a step of that `load`."""
        drafted = [request for request in running if request.num_planned_drafts]
        if not drafted:
            return
        kept = self.policy.trim(
            {r.request_id: (r.planned_draft_source, r.num_planned_drafts) for r in drafted}, load
        )
        for request in drafted:
            num_kept = kept[request.request_id]
            if request.in_flight:  # what comes of it is not known yet
                request.in_flight[-1].num_asked = num_kept
                continue
            del request.draft_token_ids[num_kept:]

    def ask(self, plan: StepPlan, requests: Iterable[Request], load: StepLoad) -> None:
        """Fill in `plan.draft_requests`; load: of the step after this one."""
        candidates = []
        asked: dict[str, Request] = {}
        for request in requests:
            if not request.proposers:
                continue
            num_drafts = len(plan.draft_token_ids.get(request.request_id, ()))
            num_after = request.num_planned_computed_tokens
            num_after += plan.num_scheduled_tokens[request.request_id]
            samples = num_after == request.num_planned_tokens + num_drafts
            # It gets a token at least, and its last token is never computed.
            room = request.max_num_tokens - request.num_planned_tokens - 2
            max_tokens = min(request.max_draft_tokens, room)
            if samples and max_tokens > 0:
                candidates.append(self._candidate(request, max_tokens, room))
                asked[request.request_id] = request
        if candidates:
            plan.draft_requests = self.policy.choose(candidates, load)
        for request_id, asks in plan.draft_requests.items():
            for ask in asks:
                if self._infos[ask.proposer].has_own_kv:
                    request = asked[request_id]
                    request.num_read[ask.proposer] = len(request.token_ids)

    def _candidate(self, request: Request, max_tokens: int, room: int) -> DraftCandidate:
        num_tokens = len(request.token_ids)
        unread = {
            name: num_tokens - request.num_read.get(name, 0)
            for name in request.proposers
            if self._infos[name].has_own_kv
        }
        # Nobody knows when it will stop: what has lasted for long will last as long again.
        num_expected = min(room, max(_FEW_TOKENS, request.num_output_tokens))
        return DraftCandidate(
            request.request_id, request.proposers, max_tokens, num_expected, unread
        )

    def take(
        self,
        request: Request,
        step: int,
        drafts: list[int],
        token_ids: list[int],
        num_kept: int,
        unverified: int | None = None,
    ) -> DraftRecord | None:
        """Count what a step made of a request's `drafts`; the record of it, if it is traced.

        `token_ids` are accepted drafts and one more, of which the request keeps `num_kept`.
        `unverified`: the first of drafts that were not worth the step. To be called before new
        drafts are noted.
        """
        num_accepted = len(token_ids) - 1
        source = request.draft_source
        for stats in (self.stats, request.speculation_stats):
            stats.count(source, len(drafts), num_accepted, num_kept)
        if drafts:
            self.policy.observe(request.request_id, source, len(drafts), num_accepted)
        elif unverified is not None:
            is_right = unverified == token_ids[0]
            self.policy.observe_unverified(request.request_id, source, int(is_right), 1)
        if not request.traces_drafts:
            return None
        return DraftRecord(step, source if drafts else "", drafts, token_ids)

    def observe_step(
        self, num_tokens: int, output: StepOutput, execute_seconds: float, other_seconds: float
    ) -> None:
        """Tell the policy what a step of `num_tokens` took: its execution, and what could not go on
        beside it of planning and updating.
        """
        self.policy.observe_step(
            StepTiming(
                num_tokens=num_tokens,
                target_seconds=execute_seconds - output.draft_seconds,
                draft_seconds=output.draft_seconds,
                num_draft_passes=output.num_draft_passes,
                num_draft_pass_tokens=output.num_draft_pass_tokens,
                is_catching_up=output.num_caught_up_tokens > 0,
                other_seconds=other_seconds,
            ),
            sum(map(len, output.token_ids)),
        )

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if request.proposers:
            self.policy.forget(request.request_id)
