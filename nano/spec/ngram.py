"""Prompt lookup: guess what followed when the text last ended like this.

Owner of one index per request. The method is Saxena's "Prompt Lookup Decoding" (2023), with an
index that grows by the token in place of a scan of the whole context in every step.
"""

import numpy as np

from nano.spec.proposer import TextProposer
from nano.step import NewRequest

# A cached prefix may bring 100,000 tokens in one step. An index falls behind rather than hold that
# step up for everybody; its request has no drafts from it until it has caught up.
_MAX_INDEXED_TOKENS = 4096


class NgramProposer(TextProposer):
    """Looks for the longest ending, of `prompt_lookup_max` down to `prompt_lookup_min` tokens, that
    occurred before. Of several places the most recent wins; it may overlap the ending.

    Time per token is proportional to the number of these lengths, whatever the context.
    """

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int):
        self._min_length = prompt_lookup_min
        self._max_length = prompt_lookup_max
        self._indexes: dict[str, NgramIndex] = {}

    def start(self, request: NewRequest) -> None:
        self._indexes[request.request_id] = NgramIndex(self._min_length, self._max_length)

    def advance(self, request_id: str, token_ids: np.ndarray) -> None:
        self._indexes[request_id].extend(token_ids)

    def propose(self, request_id: str, token_ids: np.ndarray, num_tokens: int) -> list[int]:
        index = self._indexes[request_id]
        if not index.continuation or index.num_tokens != len(token_ids):
            return []
        start = index.continuation
        drafts: list[int] = token_ids[start : start + num_tokens].tolist()
        # Past the end of what is known, reading goes on in the drafts: they repeat.
        return (drafts * -(-num_tokens // len(drafts)))[:num_tokens]

    def forget(self, request_id: str, *, has_ended: bool) -> None:
        del self._indexes[request_id]


class NgramIndex:
    """Where each run of `min_length` to `max_length` tokens of a growing text ended last.

    Keys are 64-bit hashes of runs and not the runs: 100 bytes per token and length where nothing
    repeats, beside 12,000 and more for a token's KV. Equal hashes of different runs would cost a
    wrong guess; they are keyed at random per process, so nobody can write a text full of them.
    """

    def __init__(self, min_length: int, max_length: int):
        self.num_tokens = 0
        self.continuation = 0  # where that begins which followed this ending before; 0: nowhere
        self._min_length = min_length
        self._max_length = max_length
        self._ends: dict[int, int] = {}  # hash of a run -> where its last occurrence ends

    def extend(self, token_ids: np.ndarray) -> None:
        """Take in what is new of `token_ids` [n] int32, the text from its start; at most
        `_MAX_INDEXED_TOKENS` of it."""
        start = self.num_tokens
        stop = min(len(token_ids), start + _MAX_INDEXED_TOKENS)
        first = max(0, start + 1 - self._max_length)
        data = token_ids[first:stop].tobytes()
        ends = self._ends
        for end in range(start + 1, stop + 1):
            self.continuation = 0
            last_byte = 4 * (end - first)
            for length in range(self._min_length, min(self._max_length, end) + 1):
                run = hash(data[last_byte - 4 * length : last_byte])
                # Where a run has occurred its own ending has, too: the longest comes last.
                self.continuation = ends.get(run, 0) or self.continuation
                ends[run] = end
        self.num_tokens = max(start, stop)
