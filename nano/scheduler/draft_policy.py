"""DraftPolicy: who guesses for each request, and how many of its drafts are verified. Torch-free.

Everything here maximises one number, the expected output tokens per second of a step:

    (R + survivals of the verified drafts) / (target(T + drafts) + passes of draft models + other)

R requests sample in a step of T tokens without drafts. Beside prompts, target(T) - target(R) is
taken off: the prompts cost it with drafts or without. Survivals come from `Acceptance`, seconds
from `StepTime`; `SpeculationGuard` has the last word. No clock and no chance: the same
measurements give the same decisions.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nano.scheduler.acceptance import Acceptance, DraftSlots
from nano.scheduler.draft_candidate import DraftCandidate
from nano.scheduler.draft_plan import DraftPlan, DraftStep, best_plan
from nano.scheduler.model_trial import NUM_SETTLING_STEPS, NUM_TRIAL_STEPS, ModelTrial
from nano.scheduler.step_time import SpeculationGuard, StepCosts, StepLoad, StepTiming
from nano.speculation import ProposerInfo
from nano.step import DraftRequest

_WORTHWHILE = 1.03  # a choice beats none by this factor, or it is noise
_SMOOTHING = 0.05  # gain of running means

# Of steps in which a model waits, one in so many asks the proposers that guess from text first
# even where the model is better: so that it is known when they have become so.
_SECOND_CHANCE = 64
_PATIENCE = 32  # steps with prompts
_NUM_NEW = 2  # tokens to read that are due in any step


class DraftPolicy:
    """Asks proposers for drafts, and cuts the drafts to what pays. The scheduler owns one.

    In each step: `trim` before the plan is made, `choose` after it, and when the step has run
    `observe` or `observe_unverified` of every draft, then `observe_step`.

    Proposers that guess from text cost nothing: they are asked always, so that what they would
    have been worth is known also while nothing is verified. A model's passes must pay, beside
    what the text proposers before it are expected to guess; one that does not is tried again at
    growing intervals and within a share of all seconds.

    step_seconds  (tokens, seconds) of measured steps, increasing in tokens, at least one
    is_static     asks all up to the first model for full length always, and trims nothing
    """

    def __init__(
        self,
        proposers: Sequence[ProposerInfo],
        step_seconds: Sequence[tuple[int, float]],
        *,
        is_static: bool = False,
    ):
        self._proposers = {info.name: info for info in proposers}
        self._is_static = is_static
        self._acceptance = Acceptance(list(self._proposers))
        self._guard = SpeculationGuard()
        self._costs = StepCosts(proposers, step_seconds)
        self._trials = {info.name: ModelTrial() for info in proposers if not info.is_free}
        # Of drafts from text, per request and step: verified and accepted, running means.
        self._text_verified = self._text_accepted = 0.0
        # For requests with both kinds: how often text had a guess, and whose it was last.
        self._text_guesses: dict[str, tuple[float, str]] = {}
        self._awaited: list[str] = []  # such requests, asked last
        self._next = DraftStep(StepLoad(0, 0))  # as last chosen
        self._asks: dict[tuple[tuple[str, ...], int], tuple[DraftRequest, ...]] = {}
        self._num_steps = self._num_draft_steps = 0
        self._num_prompt_steps = 0  # that followed one another
        # Since the last observe_step.
        self._num_verified = self._num_accepted = 0
        self._num_text_verified = self._num_text_accepted = 0

    # Deciding

    def choose(
        self, candidates: Sequence[DraftCandidate], load: StepLoad
    ) -> dict[str, tuple[DraftRequest, ...]]:
        """What to ask of proposers after the step being planned.

        load: of the step after it. Requests with nothing to ask are absent.
        """
        self._num_steps += 1
        self._acceptance.next_step()
        if self._awaited:  # nobody had a draft, so `trim` was not called
            self._learn_who_guessed({})
        asks = {one.request_id: self._sure_asks(one) for one in candidates}
        has_prompts = load.num_tokens > load.num_outputs
        self._num_prompt_steps = self._num_prompt_steps + 1 if has_prompts else 0
        self._next = DraftStep(load)
        self._next.gain = load.num_outputs * (1 + self._text_accepted)
        self._next.num_drafts = load.num_outputs * self._text_verified
        if self._trials and not self._is_static and self._guard.lets_draft:
            self._ask_models(candidates, asks)
            self._awaited = [
                one.request_id
                for one in candidates
                if len(one.proposers) > 1
                and (ask := asks[one.request_id])
                and ask[0].proposer not in self._trials
            ]
        return {request_id: ask for request_id, ask in asks.items() if ask}

    def trim(self, drafts: Mapping[str, tuple[str, int]], load: StepLoad) -> dict[str, int]:
        """How many of its drafts each request verifies in the step being planned.

        drafts  request id -> (proposer, number offered)
        load    of this step
        """
        if self._is_static:
            return {request_id: offered for request_id, (_, offered) in drafts.items()}
        self._learn_who_guessed(drafts)
        if not drafts or not self._guard.lets_draft:
            return dict.fromkeys(drafts, 0)
        proposers, offered = zip(*drafts.values())
        survivals = self._acceptance.survivals(list(drafts), proposers, max(offered))
        slots = DraftSlots.sort(survivals, np.array(offered))
        # These are made and paid for; the next ones will cost as much, which a step takes anyway.
        step = DraftStep(load, draft_seconds=self._next.draft_seconds)
        gains = np.concatenate([[0.0], np.cumsum(slots.survivals)])
        rates = step.rates(self._costs, load.num_outputs + gains, np.arange(len(gains)))
        best = int(np.argmax(rates))
        if rates[best] < _WORTHWHILE * rates[0]:
            best = 0
        return dict(zip(drafts, slots.lengths(best).tolist()))

    # Learning

    def observe(self, request_id: str, proposer: str, num_drafts: int, num_accepted: int) -> None:
        """Of `num_drafts` >= 1 verified drafts the leading `num_accepted` were accepted."""
        self._acceptance.observe(request_id, proposer, num_drafts, num_accepted)
        self._num_verified += num_drafts
        self._num_accepted += num_accepted
        if proposer not in self._trials:
            self._num_text_verified += num_drafts
            self._num_text_accepted += num_accepted

    def observe_unverified(
        self, request_id: str, proposer: str, num_right: int, num_drafts: int
    ) -> None:
        """A draft was trimmed to nothing, but the leading `num_right` of its first `num_drafts`
        guesses turned out right: what the target sampled shows at least the first."""
        self._acceptance.observe(request_id, proposer, num_drafts, num_right)

    def observe_step(self, timing: StepTiming, num_new_tokens: int) -> None:
        """A step ran and gave `num_new_tokens` output tokens. Follows the step's `observe`s."""
        num_outputs = max(0, num_new_tokens - self._num_accepted)
        seconds = self._costs.observe(timing, self._next.passes)
        for name, trial in self._trials.items():
            trial.earn(timing.seconds, self._trial_seconds(name))
            if name in self._next.trials:
                trial.credit -= seconds.get(name, 0.0) + self._one_draft_seconds
        if num_outputs:
            verified = self._num_text_verified / num_outputs
            accepted = self._num_text_accepted / num_outputs
            self._text_verified += _SMOOTHING * (verified - self._text_verified)
            self._text_accepted += _SMOOTHING * (accepted - self._text_accepted)
        if timing.is_catching_up or timing.num_tokens - self._num_verified != num_outputs:
            self._guard.observe_prompts()
        elif not self._is_static:
            self._guard.observe(
                num_outputs,
                num_new_tokens,
                timing.seconds,
                has_drafts=self._num_verified > 0 or timing.num_draft_passes > 0,
            )
        self._num_draft_steps += self._num_verified > 0
        self._num_verified = self._num_accepted = 0
        self._num_text_verified = self._num_text_accepted = 0

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._acceptance.forget(request_id)
        self._text_guesses.pop(request_id, None)

    def report(self) -> dict[str, float]:
        """What it believes: predicted seconds, acceptance per proposer, and shares of steps."""
        believed = {
            f"target_seconds_{n}": float(self._costs.target.seconds(n))
            for n in (1, 2, 4, 8, 16, 32, 64)
        }
        for name, trial in self._trials.items():
            believed[f"pass_seconds_{name}"] = float(self._costs.passes(name, 1))
            believed[f"trial_wait_{name}"] = float(trial.wait)
        for name in self._proposers:
            for place, rate in zip(("first", "second", "later"), self._acceptance.rates(name)):
                believed[f"acceptance_{place}_{name}"] = rate
        num_steps = max(1, self._num_steps)
        believed["other_seconds"] = self._costs.other_seconds
        believed["share_of_steps_with_drafts"] = self._num_draft_steps / num_steps
        believed["share_of_steps_off"] = self._guard.num_steps_off / num_steps
        return believed

    # Details of choosing

    def _sure_asks(self, candidate: DraftCandidate) -> tuple[DraftRequest, ...]:
        """Those to ask in any case: the proposers from text; if static, all up to a model, behind
        which nobody gets a turn."""
        key = candidate.proposers, candidate.max_tokens
        asks = self._asks.get(key)
        if asks is None:
            names = candidate.proposers
            if self._is_static:
                models = [index for index, name in enumerate(names) if name in self._trials]
                names = names[: models[0] + 1] if models else names
            else:
                names = tuple(name for name in names if name not in self._trials)
            asks = self._asks[key] = tuple(
                DraftRequest(name, min(candidate.max_tokens, self._proposers[name].num_tokens))
                for name in names
            )
        return asks

    def _ask_models(
        self, candidates: Sequence[DraftCandidate], asks: dict[str, tuple[DraftRequest, ...]]
    ) -> None:
        """Add to `asks` the models that pay: the best first, the others for whom it left out."""
        step = self._next
        models = [name for name in self._trials if any(name in c.proposers for c in candidates)]
        left, unserved = models.copy(), list(candidates)
        while left:
            plans = {name: self._plan(name, unserved, asks) for name in left}
            name = max(plans, key=lambda one: plans[one].rate)
            plan = plans[name]
            without = float(step.rates(self._costs, step.gain, step.num_drafts))
            if not self._repays_reading(name, plan, without):
                read = [one for one in unserved if one.num_unread.get(name, 0) <= _NUM_NEW]
                plan = self._plan(name, read, asks)
            if plan.rate < _WORTHWHILE * without:
                left.remove(name)
                continue
            of_length = [DraftRequest(name, n) for n in range(int(plan.lengths.max()) + 1)]
            for one, length, is_text_first in zip(
                plan.candidates, plan.lengths.tolist(), plan.is_text_first.tolist()
            ):
                if length:
                    before = asks[one.request_id] if is_text_first else ()
                    asks[one.request_id] = (*before, of_length[length])
            step.gain += plan.gain
            step.num_drafts += plan.num_drafts
            step.draft_seconds += plan.draft_seconds
            step.passes[name] = len(of_length) - 1
            left.remove(name)
            unserved = [one for one in unserved if not self._has_model(asks[one.request_id])]
        for name in models:
            self._try(name, [one for one in candidates if name in one.proposers], asks)

    def _repays_reading(self, name: str, plan: DraftPlan, without: float) -> bool:
        """Whether the requests of `plan` that model `name` must read first will save that time.

        While prompts come in, nobody knows how many will share a step: it waits for that, but not
        for ever. without: tokens per second if it is not asked.
        """
        seconds = 0.0 if self._is_settled else math.inf
        saved = 0.0
        for one, length in zip(plan.candidates, plan.lengths.tolist()):
            num_unread = one.num_unread.get(name, 0)
            if length and num_unread > _NUM_NEW:
                seconds += self._costs.reading(name, num_unread)
                saved += one.num_expected * (1 / without - 1 / plan.rate)
        return saved >= seconds or saved == 0.0

    @property
    def _is_settled(self) -> bool:
        return self._num_prompt_steps == 0 or self._num_prompt_steps > _PATIENCE

    def _has_model(self, asks: tuple[DraftRequest, ...]) -> bool:
        return bool(asks) and asks[-1].proposer in self._trials

    def _plan(
        self,
        name: str,
        candidates: Sequence[DraftCandidate],
        asks: Mapping[str, tuple[DraftRequest, ...]],
    ) -> DraftPlan:
        """The drafts of model `name` that give the most beside what is decided."""
        members = [one for one in candidates if name in one.proposers]
        if not members:
            return DraftPlan.empty(members)
        ids = [one.request_id for one in members]
        most = self._proposers[name].num_tokens
        caps = np.array([min(one.max_tokens, most) for one in members], np.intp)
        survivals = self._acceptance.survivals(ids, [name] * len(ids), int(caps.max()))
        is_text_first = self._is_text_first(name, members, survivals, asks)
        guesses = np.array([self._text_guesses.get(one, (0.0, ""))[0] for one in ids])
        plan = best_plan(
            self._next,
            self._costs,
            name,
            members,
            DraftSlots.sort(survivals, caps),
            np.where(is_text_first, 1 - guesses, 1.0),
        )
        plan.is_text_first = is_text_first
        return plan

    def _is_text_first(
        self,
        model: str,
        candidates: Sequence[DraftCandidate],
        survivals: NDArray[np.float64],
        asks: Mapping[str, tuple[DraftRequest, ...]],
    ) -> NDArray[np.bool_]:
        """Whether a guess from text, if there is one, is worth more than one of `model`: [n].

        Worth is the tokens expected, less what the time for them would give without drafts.
        """
        ids = [one.request_id for one in candidates]
        has_text = np.array([bool(asks[request_id]) for request_id in ids])
        if not has_text.any() or self._num_steps % _SECOND_CHANCE == 0:
            return has_text
        load, num = self._next.load, len(ids)
        without, with_one = self._costs.step(load, np.array([0.0, num])).tolist()
        per_draft = load.num_outputs / without * (with_one - without) / num
        per_pass = load.num_outputs / without * float(self._costs.passes(model, num)) / num
        texts = [
            self._text_guesses[one][1]
            if one in self._text_guesses
            else next((ask.proposer for ask in asks[one]), model)
            for one in ids
        ]
        of_text = self._acceptance.survivals(ids, texts, survivals.shape[1])
        worth_of_text = np.cumsum(of_text - per_draft, axis=1).max(axis=1)
        worth = np.cumsum(survivals - per_draft - per_pass, axis=1).max(axis=1)
        return np.asarray(has_text & (np.maximum(worth_of_text, 0.0) >= worth))

    def _try(
        self,
        name: str,
        candidates: Sequence[DraftCandidate],
        asks: dict[str, tuple[DraftRequest, ...]],
    ) -> None:
        """Ask model `name`, if it is time, for a draft of a request that seems not worth it."""
        trial = self._trials[name]
        if not trial.request_id:
            trial.num_until_next -= 1
            cost = NUM_TRIAL_STEPS * self._trial_seconds(name)
            if trial.num_until_next > 0 or trial.credit < cost or not self._is_settled:
                return
        is_asked = {
            one.request_id: any(ask.proposer == name for ask in asks[one.request_id])
            for one in candidates
        }
        if not trial.request_id:
            unasked = [request_id for request_id, asked in is_asked.items() if not asked]
            if not unasked:
                trial.num_until_next = trial.wait
                return
            trial.begin(self._acceptance.longest_unseen(unasked, name))
        elif trial.request_id not in is_asked:  # it has ended, or waits
            trial.request_id = ""
            return
        elif is_asked[trial.request_id] or trial.num_steps_left == 0:
            trial.end(pays=is_asked[trial.request_id])
            return
        trial.num_steps_left -= 1
        if trial.num_steps_left >= NUM_SETTLING_STEPS:
            asks[trial.request_id] = (DraftRequest(name, 1),)
            self._next.draft_seconds += float(self._costs.passes(name, 1))
            if name not in self._next.passes:
                self._next.passes[name] = 1
                self._next.trials.append(name)

    def _trial_seconds(self, name: str) -> float:
        """Of a trial's step: to make a draft, and to verify it."""
        return float(self._costs.passes(name, 1)) + self._one_draft_seconds

    @property
    def _one_draft_seconds(self) -> float:
        without, with_one = self._costs.step(self._next.load, np.array([0.0, 1.0])).tolist()
        return float(with_one - without)

    # Details of learning

    def _learn_who_guessed(self, drafts: Mapping[str, tuple[str, int]]) -> None:
        for request_id in self._awaited:
            often, last = self._text_guesses.get(request_id, (0.0, ""))
            proposer = drafts[request_id][0] if request_id in drafts else ""
            if proposer and proposer not in self._trials:
                self._text_guesses[request_id] = often + 0.1 * (1 - often), proposer
            elif last:
                self._text_guesses[request_id] = 0.9 * often, last
        self._awaited = []
