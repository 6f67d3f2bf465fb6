"""Proposer: who guesses the next tokens. A wrong guess costs time, never correctness."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nano.batch.input_batch import InputBatch
from nano.batch.request_states import RequestStates
from nano.kv_spec import LayerKVSpec
from nano.sampling.sampler import SamplerOutput


@dataclass(slots=True)
class ProposalInput:
    """One finished target step, as a proposer may see it. Nothing in it may be written."""

    batch: InputBatch
    sampled: SamplerOutput
    states: RequestStates  # after commit: the accepted tokens are known
    hidden: Tensor  # [T, hidden] the target's last hidden states


@dataclass(slots=True)
class DraftTokens:
    """Guesses per request of the batch, in batch order; [] for none."""

    token_ids: list[list[int]]
    sources: list[list[str]]  # the proposer of each token


class Proposer(ABC):
    """Guesses tokens for the requests that the plan asks drafts for."""

    num_lookahead_tokens: int = 0  # KV slots written past the target's last token
    hidden_layers: tuple[int, ...] = ()  # target layers whose hidden states it reads

    def kv_layers(self) -> list[LayerKVSpec]:
        """KV layers of its own; they join the target's blocks."""
        return []

    @abstractmethod
    def propose(self, step: ProposalInput, num_draft_tokens: np.ndarray) -> DraftTokens:
        """Up to `num_draft_tokens[i]` guesses for request i. [R] int32, 0 = none wanted."""


class NoProposer(Proposer):
    """Speculation off. Being a proposer like any other, it needs no `if` in the model runner."""

    def propose(self, step: ProposalInput, num_draft_tokens: np.ndarray) -> DraftTokens:
        nothing: list[list[int]] = [[] for _ in step.batch.request_ids]
        return DraftTokens(token_ids=nothing, sources=[[] for _ in nothing])


def make_proposer() -> Proposer:
    """The configured proposer. The one place that will read a method's name."""
    return NoProposer()
