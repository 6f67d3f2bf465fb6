"""Proposers: all that are loaded, run side by side after each step."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nano.kv_spec import LayerKVSpec
from nano.model_input.input_batch import InputBatch
from nano.model_input.own_drafts import DraftIds
from nano.model_input.request_states import RequestStates
from nano.spec.proposer import ModelProposer, TextProposer
from nano.step import StepPlan


@dataclass(slots=True)
class Drafts:
    """Guesses for the next step, per request in batch order, and what they took."""

    made: list[DraftIds]  # [] for none
    sources: list[str]  # the proposer of each, "" for none
    seconds: float = 0.0  # of the proposers that run a model, to queue what it computes
    num_passes: int = 0
    num_pass_tokens: int = 0
    num_caught_up_tokens: int = 0


@dataclass(slots=True)
class _Group:
    """What one model is asked for in one step."""

    place: list[int] = field(default_factory=list)  # in the batch
    num_tokens: list[int] = field(default_factory=list)

    def add(self, i: int, num_tokens: int) -> None:
        self.place.append(i)
        self.num_tokens.append(num_tokens)


class Proposers:
    """Called by the model runner: `update` before each step, `propose` after it.

    With none loaded both do nothing, so the runner needs no `if`.
    """

    def __init__(
        self,
        text: Mapping[str, TextProposer] | None = None,
        models: Mapping[str, ModelProposer] | None = None,
    ):
        self._text = dict(text or {})
        self._models = dict(models or {})
        self._users: dict[str, list[str]] = {}  # request -> text proposers that follow it

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots that any of them writes past the target's last token."""
        return max((model.num_lookahead_tokens for model in self._models.values()), default=0)

    def model(self, name: str) -> ModelProposer:
        """The proposer `name`, which runs a model."""
        return self._models[name]

    def needs_prediction(self, name: str) -> bool:
        """Whether it serves only requests that bring the text to guess from."""
        return name in self._text and self._text[name].needs_prediction

    def kv_layers(self) -> list[LayerKVSpec]:
        """KV layers of their own; they join the target's blocks."""
        return [layer for model in self._models.values() for layer in model.kv_layers()]

    def update(self, plan: StepPlan, states: RequestStates) -> None:
        """See a plan before it is executed: `states` have just applied it."""
        for request_ids, has_ended in (
            (plan.finished_request_ids, True),
            (plan.preempted_request_ids, False),
        ):
            for request_id in request_ids:
                for name in self._users.pop(request_id, ()):
                    self._text[name].forget(request_id, has_ended=has_ended)
        for new in plan.new_requests:
            names = [
                name
                for name in new.proposers
                if name in self._text
                and (new.prediction_token_ids or not self._text[name].needs_prediction)
            ]
            if names:
                self._users[new.request_id] = names
            for name in names:
                self._text[name].start(new)
        for model in self._models.values():
            model.update(plan, states)

    def propose(
        self,
        plan: StepPlan,
        batch: InputBatch,
        sampled: Sequence[list[int]],
        states: RequestStates,
    ) -> Drafts:
        """What the plan asks for. `sampled`: the step's new tokens, which `states` know by now."""
        drafts = Drafts([[] for _ in sampled], ["" for _ in sampled])
        if not self._users and not plan.draft_requests:
            return drafts
        groups: dict[str, _Group] = {}
        for i, request_id in enumerate(batch.request_ids):
            row = int(batch.rows[i])
            num_tokens = states.num_tokens[row] if sampled[i] else states.num_computed_tokens[row]
            known = states.token_ids[row, :num_tokens]
            for name in self._users.get(request_id, ()):
                self._text[name].advance(request_id, known)
            if not sampled[i] or _has_ended(states, row, known):
                continue
            for asked in plan.draft_requests.get(request_id, ()):
                if asked.proposer in self._models:  # which guesses for all its rows at once
                    groups.setdefault(asked.proposer, _Group()).add(i, asked.num_tokens)
                    break
                text = self._text[asked.proposer]
                token_ids = text.propose(request_id, known, asked.num_tokens)
                if token_ids:
                    drafts.made[i], drafts.sources[i] = token_ids, asked.proposer
                    break
        started = time.perf_counter()
        for name, group in groups.items():
            rows = [int(batch.rows[i]) for i in group.place]
            found = self._models[name].propose(states, rows, group.num_tokens)
            drafts.num_passes += found.num_passes
            drafts.num_pass_tokens += found.num_pass_tokens
            drafts.num_caught_up_tokens += found.num_caught_up_tokens
            for i, row, made, probs in zip(group.place, rows, found.made, found.probs):
                if made is not None:
                    drafts.made[i], drafts.sources[i] = made, name
                if probs is not None:
                    states.keep_draft_probs(row, probs)
        drafts.seconds = time.perf_counter() - started if groups else 0.0
        return drafts


def _has_ended(states: RequestStates, row: int, known: np.ndarray) -> bool:
    """Whether the newest token is a stop token, so that nobody will want a guess."""
    params = states.row_params(row)
    num_output = len(known) - states.num_prompt_tokens[row]
    return (
        int(known[-1]) in params.stop_token_ids and num_output >= params.sampling_params.min_tokens
    )
