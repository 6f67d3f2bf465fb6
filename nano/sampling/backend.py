"""SamplingBackend: what is computed over whole rows of logits. L rows of V logits.

Our own kernels, and torch for float64, other devices and machines without a compiler. All draw from
the same distributions with the same noise; a last bit may differ. Results lie where the logits do,
and nobody waits for a device here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nano.device import HostTransfers, Transfers
from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates

NO_TOKEN = -1


class DrawTable(Protocol):
    """By what rows are drawn. `RequestStates` is the table of all requests' own draws."""

    @property
    def draws(self) -> np.ndarray:
        """[R, 4] float64: temperature (0: greedy), top_p, min_p, top_k."""

    @property
    def seeds(self) -> np.ndarray:
        """[R] int64."""


@dataclass(frozen=True, slots=True)
class NoiseTable:
    """A `DrawTable` for noise of another domain."""

    draws: np.ndarray
    seeds: np.ndarray


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """N tokens' log probabilities, as `TokenLogprobs` has them, where the logits are."""

    token_ids: Tensor  # [N, 1 + num_top] int64
    logprobs: Tensor  # [N, 1 + num_top], the logits' dtype
    ranks: Tensor  # [N] int64


class SamplingBackend(ABC):
    """Rows of logits -> tokens and log probabilities. Every row alone; nothing is kept."""

    name: str

    def __init__(self, transfers: Transfers | None = None) -> None:
        """`transfers`: to where the logits are; None is main memory."""
        self.transfers = transfers or HostTransfers()

    @classmethod
    @abstractmethod
    def is_available(cls, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it can serve such logits here."""

    @abstractmethod
    def penalise(
        self, logits: Tensor, index: np.ndarray, rows: LogitsRows, states: RequestStates
    ) -> None:
        """Apply repetition, frequency and presence penalties to rows `index` [N] int64, in place.

        logits: [L, V] contiguous. Repetition counts prompt and output, the others the output alone.
        """

    @abstractmethod
    def draw(
        self, logits: Tensor, rows: LogitsRows, table: DrawTable, processed: Tensor | None
    ) -> Tensor:
        """[L] int64: a token per row of `logits` [L, V], NO_TOKEN where its best is not finite.

        rows: `row` is into `table`, `num_known` the position that keys the noise.
        processed: [L, V] to fill with the logits that each token was drawn from, -inf where
        truncation excluded a token; greedy rows as they are; rows with NO_TOKEN as it happens.
        """

    @abstractmethod
    def gather_logprobs(
        self, logits: Tensor, index: Tensor, token_ids: Tensor, num_top: int
    ) -> LogprobTensors:
        """Of the rows `index` [N] of `logits`: logprobs of `token_ids` [N] and the `num_top` best.

        int64 both, beside the logits. num_top: in [0, V]. Of equal alternatives the CPU's kernels
        take the lowest token id.
        """
