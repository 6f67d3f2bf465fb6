"""DeviceDrafts: drafts that a model made and the host has not read. They can be verified unread.

N rows of at most K drafts come out of one loop of passes. How many each row has is known from the
start; which ones they are, the host learns when it asks.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nano.device import HostCopy, Transfers


class DraftTable:
    """Drafts of N rows, at most K each: on the device, and on their way to the host."""

    def __init__(self, device: Transfers, token_ids: Tensor):
        """token_ids: [N, K] int64, below 0 where a model could not guess. Not written any more."""
        self.token_ids = token_ids
        self._copy: HostCopy = device.to_host([token_ids])

    def read(self) -> np.ndarray:
        """[N, K] int64. Waits, the first time, for the passes that make them."""
        return self._copy.wait()[0]


@dataclass(frozen=True, slots=True)
class DeviceDrafts:
    """The drafts of one request: the first `num_tokens` of a row of a table."""

    table: DraftTable
    index: int  # of the row
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens

    def first(self, num_tokens: int) -> "DeviceDrafts":
        """At most so many of them."""
        return dataclasses.replace(self, num_tokens=min(num_tokens, self.num_tokens))

    def read(self) -> list[int]:
        """Those before the first that could not be guessed."""
        token_ids: list[int] = self.table.read()[self.index, : self.num_tokens].tolist()
        return next((token_ids[:i] for i, one in enumerate(token_ids) if one < 0), token_ids)

    def read_as_verified(self) -> list[int]:
        """All `num_tokens`, as a step computes them unread: `fed` says what a bad one is."""
        return [max(one, 0) for one in self.table.read()[self.index, : self.num_tokens].tolist()]


def fed(token_ids: Tensor) -> Tensor:
    """Sampled tokens as a model's input, int64 -> int32. What is no token is read as token 0: a
    guess like any other, verified like any other."""
    return token_ids.clamp(min=0).int()
