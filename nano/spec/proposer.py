"""Proposer: who guesses the next tokens. A wrong guess costs time, never correctness.

Two kinds, which `proposers.py` runs side by side: one that looks at text (`TextProposer`), and one
that runs a model (`ModelProposer`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nano.kv_spec import LayerKVSpec
from nano.model_input.device_drafts import DeviceDrafts
from nano.model_input.request_states import RequestStates
from nano.spec.drafting_model import DraftingModel
from nano.step import NewRequest, StepPlan


class TextProposer(ABC):
    """Guesses from token ids alone, on the host, in microseconds.

    Called for requests that name it in `NewRequest.proposers` only, and in this order: `start`,
    then any number of `advance` and `propose`, then `forget`. A preempted request is forgotten
    with `has_ended` False and starts again later, with the tokens it had.
    """

    needs_prediction: bool = False  # only requests with `prediction_token_ids` are its own

    @abstractmethod
    def start(self, request: NewRequest) -> None:
        """A request gets a row."""

    @abstractmethod
    def advance(self, request_id: str, token_ids: np.ndarray) -> None:
        """Tokens known so far: [n] int32, prompt and output, a view that grows from call to call.

        Called in every step that computes tokens of the request, so that an index grows with a
        prompt's chunks: the tokens whose KV is computed, and at the end all that are known.
        """

    @abstractmethod
    def propose(self, request_id: str, token_ids: np.ndarray, num_tokens: int) -> list[int]:
        """Up to `num_tokens` guesses of what follows `token_ids`, [] for none.

        Follows an `advance` with the same tokens.
        """

    @abstractmethod
    def forget(self, request_id: str, *, has_ended: bool) -> None:
        """The request's row is gone."""


@dataclass(slots=True)
class ModelDrafts:
    """Guesses of a model for some rows, in their order."""

    made: list[DeviceDrafts | None]  # None where it could not guess
    # What each draft was drawn from, [k, V] float32 probabilities; None under the match rule.
    probs: list[Tensor | None]
    num_passes: int  # of the model
    num_pass_tokens: int  # that these passes computed
    num_caught_up_tokens: int = 0  # of those, what had been known for longer than a step


class ModelProposer(ABC):
    """Guesses by a model of its own, or by the target's weights in another form."""

    num_lookahead_tokens: int = 0  # KV slots written past the target's last known token
    hidden_layers: tuple[int, ...] = ()  # target layers whose hidden states it reads
    query_lens: tuple[int, ...] = (1,)  # tokens per row of the passes that are worth a full graph

    @abstractmethod
    def kv_layers(self) -> list[LayerKVSpec]:
        """KV layers of its own, role "draft"; they join the target's blocks. [] for none."""

    @abstractmethod
    def bind(self, drafting: DraftingModel, num_blocks: int) -> None:
        """Called once, before the first step, when the sizes are known."""

    @abstractmethod
    def update(self, plan: StepPlan, states: RequestStates) -> None:
        """See a plan before it is executed: `states` have just applied it."""

    @abstractmethod
    def propose(
        self, states: RequestStates, rows: Sequence[int], num_tokens: Sequence[int]
    ) -> ModelDrafts:
        """Up to `num_tokens[i]` >= 1 guesses behind the known tokens of `rows[i]`."""
