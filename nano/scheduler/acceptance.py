"""Acceptance: how likely guesses are right, per request, proposer and position in the draft.

`DraftSlots` puts those positions in the order in which they are worth verifying.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The first position, the second, and all later ones: a proposer that has begun well goes on well,
# and how well depends little on how far it is.
_NUM_PLACES = 3
_FIRST_GUESS = 0.7  # acceptance of a proposer nobody has seen: high, so that it is tried
_FIRST_WEIGHT = 2.0  # in observations
_PRIOR_WEIGHT = 4.0  # of what is known of all requests, in observations of one
# Kept of older evidence with each observation; with each step that brought none.
_KEPT, _KEPT_OF_ALL, _KEPT_IDLE = 0.93, 0.99, 0.99


class Acceptance:
    """Estimates of the chance that a position is accepted, given that those before it were.

    For each request and proposer two exponentially fading counts per place: offered, where all
    before it were accepted, and accepted. The proposer's own counts over all requests are the
    prior of each request's; the prior of those is the place before, so that what was not seen for
    long is expected to be like what is. Evidence fades when there is new: until then the last that
    was known stands.
    """

    def __init__(self, proposers: Sequence[str]):
        self._proposers = {name: index for index, name in enumerate(proposers)}
        self._rows: dict[tuple[str, str], int] = {}  # request id, proposer -> row
        self._free_rows: list[int] = []
        # [rows, 2, places]: accepted and offered; the same of each proposer, [P, 2, places].
        self._counts = np.zeros((0, 2, _NUM_PLACES))
        self._row_proposer = np.zeros(0, np.intp)
        self._observed_at = np.zeros(0, np.int64)  # step
        self._counts_of_all = np.zeros((len(proposers), 2, _NUM_PLACES))
        self._all_observed_at = np.zeros(len(proposers), np.int64)
        self._rates_of_all = np.full((len(proposers), _NUM_PLACES), _FIRST_GUESS)
        self._pending: dict[int, tuple[int, int]] = {}  # row -> drafts, accepted
        self._step = 0

    def next_step(self) -> None:
        """Time passes."""
        self._step += 1

    def observe(self, request_id: str, proposer: str, num_drafts: int, num_accepted: int) -> None:
        """Of `num_drafts` guesses the leading `num_accepted` were right, the next was not."""
        if num_drafts < 1:
            return
        row = self._rows.get((request_id, proposer))
        if row is None:
            row = self._add_row((request_id, proposer))
        if row in self._pending:
            self._apply_pending()
        self._pending[row] = (num_drafts, num_accepted)

    def survivals(
        self, request_ids: Sequence[str], proposers: Sequence[str], num_tokens: int
    ) -> NDArray[np.float64]:
        """The chance that a position and all before it are accepted: [requests, num_tokens].

        `proposers` has one name per request.
        """
        self._apply_pending()
        rows = self._find_rows(zip(request_ids, proposers))
        accepted, offered = self._counts[rows].swapaxes(0, 1)
        prior = self._rates_of_all[self._row_proposer[rows]]
        rates = (accepted + _PRIOR_WEIGHT * prior) / (offered + _PRIOR_WEIGHT)
        places = np.minimum(np.arange(num_tokens), _NUM_PLACES - 1)
        return np.cumprod(rates[:, places], axis=1)

    def rates(self, proposer: str) -> list[float]:
        """Over all requests: the chance of the first position, the second, and later ones."""
        self._apply_pending()
        rates: list[float] = self._rates_of_all[self._proposers[proposer]].tolist()
        return rates

    def longest_unseen(self, request_ids: Sequence[str], proposer: str) -> str:
        """The request, of at least one, about which the newest evidence is oldest."""
        self._apply_pending()
        rows = self._find_rows((one, proposer) for one in request_ids)
        return request_ids[int(np.argmin(self._observed_at[rows]))]

    def forget(self, request_id: str) -> None:
        """The request is gone; what it taught about its proposers stays."""
        self._apply_pending()
        for proposer in self._proposers:
            row = self._rows.pop((request_id, proposer), None)
            if row is not None:
                self._free_rows.append(row)

    def _find_rows(self, keys: Iterable[tuple[str, str]]) -> NDArray[np.intp]:
        keys = list(keys)
        rows = list(map(self._rows.get, keys))
        if None in rows:
            rows = [row if row is not None else self._add_row(key) for row, key in zip(rows, keys)]
        return np.array(rows, np.intp)

    def _add_row(self, key: tuple[str, str]) -> int:
        if not self._free_rows:
            self._grow()
        row = self._rows[key] = self._free_rows.pop()
        self._counts[row] = 0
        self._row_proposer[row] = self._proposers[key[1]]
        self._observed_at[row] = 0
        return row

    def _grow(self) -> None:
        num_rows = len(self._counts)
        num_new = max(64, num_rows)
        self._free_rows.extend(range(num_rows + num_new - 1, num_rows - 1, -1))
        self._counts = np.concatenate([self._counts, np.zeros((num_new, 2, _NUM_PLACES))])
        self._row_proposer = np.concatenate([self._row_proposer, np.zeros(num_new, np.intp)])
        self._observed_at = np.concatenate([self._observed_at, np.zeros(num_new, np.int64)])

    def _apply_pending(self) -> None:
        """Fold in a step's observations, all rows at once."""
        if not self._pending:
            return
        rows = np.array(list(self._pending), np.intp)
        num_drafts, num_accepted = np.array(list(self._pending.values())).T
        self._pending.clear()
        # Positions behind the first miss were offered to nobody.
        num_offered = np.minimum(num_accepted + 1, num_drafts)
        counts = np.stack([_by_place(num_accepted), _by_place(num_offered)], axis=1)
        num_idle = np.maximum(self._step - self._observed_at[rows] - 1, 0)
        kept = _KEPT * _KEPT_IDLE**num_idle
        self._counts[rows] = self._counts[rows] * kept[:, None, None] + counts
        self._observed_at[rows] = self._step

        of_row = self._row_proposer[rows]
        num_of_all = np.bincount(of_row, minlength=len(self._proposers))
        seen = num_of_all > 0
        num_idle = np.maximum(self._step - self._all_observed_at - 1, 0)
        kept = np.where(seen, _KEPT_OF_ALL**num_of_all * _KEPT_IDLE**num_idle, 1.0)
        self._counts_of_all *= kept[:, None, None]
        np.add.at(self._counts_of_all, of_row, counts)
        self._all_observed_at[seen] = self._step
        before: NDArray[np.float64] | float = _FIRST_GUESS
        for place in range(_NUM_PLACES):
            accepted, offered = self._counts_of_all[:, :, place].T
            before = (accepted + _FIRST_WEIGHT * before) / (offered + _FIRST_WEIGHT)
            self._rates_of_all[:, place] = before


@dataclass(frozen=True, slots=True)
class DraftSlots:
    """Positions in the drafts of several requests, those most likely accepted first.

    As a position never survives more often than the one before it, the first n slots are leading
    positions of each request, and no other n drafts have more accepted in expectation.
    """

    rows: NDArray[np.intp]  # [n] index of the request
    positions: NDArray[np.intp]  # [n] in its draft, from 0
    survivals: NDArray[np.float64]  # [n] falling
    num_rows: int

    @classmethod
    def sort(cls, survivals: NDArray[np.float64], num_tokens: NDArray[np.intp]) -> "DraftSlots":
        """Of `survivals` [requests, K] the leading `num_tokens` [requests] of each row."""
        num_rows, most = survivals.shape
        exists = np.arange(most) < num_tokens[:, None]
        keys = np.where(exists, -survivals, 1.0).ravel()
        order = np.argsort(keys, kind="stable")[: int(num_tokens.sum())]
        rows, positions = np.divmod(order, most)
        return cls(rows, positions, survivals.ravel()[order], num_rows)

    def within(self, num_positions: int) -> "DraftSlots":
        """Those of the first `num_positions` of each draft."""
        kept = self.positions < num_positions
        return DraftSlots(
            self.rows[kept], self.positions[kept], self.survivals[kept], self.num_rows
        )

    def lengths(self, num_slots: int) -> NDArray[np.intp]:
        """Drafts of each request among the first `num_slots`: [requests]."""
        return np.asarray(np.bincount(self.rows[:num_slots], minlength=self.num_rows))


def _by_place(num_positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the leading `num_positions` [n] each place holds: [n, places]."""
    behind: NDArray[np.int64] = np.maximum(num_positions[:, None] - np.arange(_NUM_PLACES), 0)
    behind[:, :-1] = np.minimum(behind[:, :-1], 1)
    return behind
