"""Predicted outputs: the caller says what it thinks will come, and is taken at its word.

Owner of the place in its prediction that each request has reached. The parameter is OpenAI's; it
serves edits, where most of the output is text that the caller has.
"""

import numpy as np

from nano.spec.proposer import TextProposer
from nano.step import NewRequest

# An ending that is longer decides hardly ever: on edits of code and prose, 4 and 16 gave the same
# number of steps within 0.1 %. A single token, at the nearest place, is worth a try (2.5 % fewer).
_MAX_ENDING = 8
_MAX_DEPARTED_REQUESTS = 32


class PredictionProposer(TextProposer):
    """Drafts the prediction from where the output has come to in it.

    The output follows the prediction from its start. Where they part, the place is found again by
    the longest ending of the text, of up to 8 tokens, that the prediction contains; of several
    places the nearest ahead, then the nearest behind. A token that it does not contain at all is
    taken to replace one: the best guess is then to go on behind that one.
    """

    needs_prediction = True

    def __init__(self) -> None:
        self._alignments: dict[str, _Alignment] = {}
        self._departed: dict[str, _Alignment] = {}  # preempted, oldest first

    def start(self, request: NewRequest) -> None:
        alignment = self._departed.pop(request.request_id, None)
        if alignment is None or not alignment.is_of(request):
            alignment = _Alignment(request)
        self._alignments[request.request_id] = alignment

    def advance(self, request_id: str, token_ids: np.ndarray) -> None:
        self._alignments[request_id].advance(token_ids)

    def propose(self, request_id: str, token_ids: np.ndarray, num_tokens: int) -> list[int]:
        alignment = self._alignments[request_id]
        if alignment.cursor is None:
            return []
        return list(alignment.prediction[alignment.cursor : alignment.cursor + num_tokens])

    def forget(self, request_id: str, *, has_ended: bool) -> None:
        alignment = self._alignments.pop(request_id)
        if not has_ended:
            self._departed[request_id] = alignment
            if len(self._departed) > _MAX_DEPARTED_REQUESTS:
                del self._departed[next(iter(self._departed))]


class _Alignment:
    """Of one request's output with its prediction."""

    def __init__(self, request: NewRequest):
        self.prediction = request.prediction_token_ids
        self.cursor: int | None = 0  # of the predicted token that should come next
        self.num_tokens = request.num_prompt_tokens  # seen so far, the prompt included
        self._num_prompt_tokens = request.num_prompt_tokens
        self._prediction = np.array(self.prediction, np.int32)
        self._num_followed = 0  # the cursor when the output last did as predicted
        self._num_strayed = 0  # tokens since then

    def is_of(self, request: NewRequest) -> bool:
        return (self.prediction, self._num_prompt_tokens) == (
            request.prediction_token_ids,
            request.num_prompt_tokens,
        ) and self.num_tokens <= len(request.token_ids)

    def advance(self, token_ids: np.ndarray) -> None:
        """`token_ids` [n] int32 from the start; fewer than known when KV is computed again."""
        if len(token_ids) <= self.num_tokens:
            return
        for token_id in token_ids[self.num_tokens :].tolist():
            cursor = self.cursor
            if cursor is not None and self.prediction[cursor : cursor + 1] == (token_id,):
                self.cursor = self._num_followed = cursor + 1
                self._num_strayed = 0
            else:
                self.cursor = None
                self._num_strayed += 1
        self.num_tokens = len(token_ids)
        if self.cursor is None:
            self.cursor = self._find(token_ids[-_MAX_ENDING:])

    def _find(self, ending: np.ndarray) -> int | None:
        """The place behind the best match of `ending`, the last tokens."""
        ends = np.flatnonzero(self._prediction == ending[-1]) + 1  # a scan takes 10 us per 10,000
        if not len(ends):
            return self._num_followed + 1 if self._num_strayed == 1 else None
        for length in range(2, len(ending) + 1):
            longer = ends[ends >= length]
            longer = longer[self._prediction[longer - length] == ending[-length]]
            if not len(longer):
                break
            ends = longer
        ahead = int(np.searchsorted(ends, self._num_followed))
        return int(ends[min(ahead, len(ends) - 1)])
