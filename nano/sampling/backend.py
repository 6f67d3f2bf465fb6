"""SamplingBackend: what is computed over whole rows of logits. L rows of V logits.

Two of a kind: our own kernels, and torch for float64, other devices and machines without a
compiler. Both draw from the same distributions with the same noise; a last bit may differ.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.step import TokenLogprobs

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


class SamplingBackend(ABC):
    """Rows of logits -> tokens and log probabilities. Every row alone; nothing is kept."""

    name: str

    @classmethod
    @abstractmethod
    def is_available(cls, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it can serve such logits here."""

    @abstractmethod
    def penalise(
        self, logits: Tensor, index: np.ndarray, rows: LogitsRows, states: RequestStates
    ) -> None:
        """Apply repetition, frequency and presence penalties to rows `index` [N] int64, in place.

        logits: [L, V]. Repetition counts prompt and output, the others the output alone.
        """

    @abstractmethod
    def draw(
        self, logits: Tensor, rows: LogitsRows, table: DrawTable, processed: Tensor | None
    ) -> list[int]:
        """One token per row of `logits` [L, V], or NO_TOKEN where the best logit is not finite.

        rows: `row` is into `table`, `num_known` the position that keys the noise.
        processed: [L, V] to fill with the logits that each token was drawn from, -inf where
        truncation excluded a token; greedy rows as they are; rows with NO_TOKEN as it happens.
        """

    @abstractmethod
    def gather_logprobs(
        self, logits: Tensor, index: Tensor, token_ids: Tensor, num_top: int
    ) -> TokenLogprobs:
        """Of the rows `index` [N] of `logits`: logprobs of `token_ids` [N] and the `num_top` best.

        int64 both. num_top: in [0, V]. Of equal alternatives the kernels take the lowest token id.
        """
