"""SelfQuantized: the target's own weights, quantised, guess for the target. No second model.

It reads the target's own KV: what the target has computed of a request is what it attends to. The
drafts' KV goes into the slots behind the known tokens, which verification writes before it reads.
So there is nothing to ingest and nothing to remember.
"""

from collections.abc import Sequence

from nano.kv_spec import LayerKVSpec
from nano.model_input.request_states import RequestStates
from nano.spec.draft_passes import RowWork, draft_ahead
from nano.spec.drafting_model import DraftingModel
from nano.spec.proposer import ModelDrafts, ModelProposer
from nano.step import StepPlan


class SelfQuantized(ModelProposer):
    """Guesses with a coarser copy of the target's weights over the target's KV cache."""

    def __init__(self, num_lookahead_tokens: int):
        self.num_lookahead_tokens = num_lookahead_tokens

    def kv_layers(self) -> list[LayerKVSpec]:
        return []

    def bind(self, drafting: DraftingModel, num_blocks: int) -> None:
        """See `ModelProposer`; the context holds the target's caches."""
        self._drafting = drafting

    def update(self, plan: StepPlan, states: RequestStates) -> None:
        """Nothing to know of it."""

    def propose(
        self, states: RequestStates, rows: Sequence[int], num_tokens: Sequence[int]
    ) -> ModelDrafts:
        work = []
        for row, wanted in zip(rows, num_tokens):
            num_known = int(states.num_tokens[row])  # of which the newest is not computed
            num_drafts = min(wanted, states.most_drafts(row))
            work.append(RowWork(row, num_known - 1, num_known, num_drafts))
        return draft_ahead(self._drafting, states, work)
