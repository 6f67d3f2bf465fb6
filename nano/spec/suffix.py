"""Suffix decoding: guess what most often followed the longest match of the text's ending.

Owner of what each request has said so far and of a bounded store of past outputs. After Oliaro et
al. 2024, "SuffixDecoding", arXiv 2411.04975, with automata in place of their trees.
"""

from array import array
from collections import deque

import numpy as np

from nano.spec.proposer import TextProposer
from nano.spec.suffix_automaton import Match, SuffixAutomaton
from nano.step import NewRequest

_END_OF_OUTPUT = -1
# What one call may do, so that no long text holds a step up: an automaton falls behind instead.
_MAX_INDEXED_TOKENS = 1024
_MAX_ABSORBED_TOKENS = 16
_MAX_DEPARTED_REQUESTS = 32


class SuffixProposer(TextProposer):
    """Matches a request's ending with its own text and with past outputs of the same salt.

    max_tree_depth       longest match, in tokens
    max_cached_requests  past outputs kept per salt
    max_spec_factor      most drafts per token of the match
    min_token_prob       least estimated probability that a draft is right, with all before it
    max_tokens_per_salt, max_tokens, max_salts   bounds of the store

    The source whose draft promises the most accepted tokens is used. A salt's text is never seen,
    counted or moved on behalf of another; only when the store as a whole is full does the least
    recently used salt lose its own.
    """

    def __init__(
        self,
        max_tree_depth: int,
        max_cached_requests: int,
        max_spec_factor: float,
        min_token_prob: float,
        *,
        max_tokens_per_salt: int = 2**18,
        max_tokens: int = 2**20,
        max_salts: int = 64,
    ):
        self._max_depth = max_tree_depth
        self._max_spec_factor = max_spec_factor
        self._min_token_prob = min_token_prob
        self.store = OutputStore(
            max_tree_depth, max_cached_requests, max_tokens_per_salt, max_tokens, max_salts
        )
        self._requests: dict[str, _RequestText] = {}
        self._departed: dict[str, _RequestText] = {}  # preempted, oldest first

    def start(self, request: NewRequest) -> None:
        text = self._departed.pop(request.request_id, None)
        if text is None or not text.is_beginning_of(request):
            text = _RequestText(request, self._max_depth)
        self._requests[request.request_id] = text

    def advance(self, request_id: str, token_ids: np.ndarray) -> None:
        text = self._requests[request_id]
        outputs = self.store.get(text.cache_salt)
        if outputs is not None:
            outputs.absorb(_MAX_ABSORBED_TOKENS)
        text.extend(token_ids, outputs.generations if outputs is not None else [])

    def propose(self, request_id: str, token_ids: np.ndarray, num_tokens: int) -> list[int]:
        best: list[int] = []
        most_expected = 0.0
        for automaton, match in self._requests[request_id].all_matches():
            num_drafts = min(num_tokens, int(self._max_spec_factor * match.length))
            drafts, num_expected = automaton.draft(match, num_drafts, self._min_token_prob)
            if num_expected > most_expected:
                best, most_expected = drafts, num_expected
        return best

    def forget(self, request_id: str, *, has_ended: bool) -> None:
        text = self._requests.pop(request_id)
        if has_ended:
            self.store.add(text.cache_salt, text.output)
            return
        text.matches.clear()
        self._departed[request_id] = text
        if len(self._departed) > _MAX_DEPARTED_REQUESTS:
            del self._departed[next(iter(self._departed))]


class _RequestText:
    """One request's tokens, their automaton, and how their ending matches past outputs."""

    def __init__(self, request: NewRequest, max_depth: int):
        self.cache_salt = request.cache_salt
        self.matches: dict[SuffixAutomaton, Match] = {}
        self._num_prompt_tokens = request.num_prompt_tokens
        self._max_depth = max_depth
        self._token_ids = array("i")
        self._automaton = SuffixAutomaton(max_depth)

    @property
    def output(self) -> "array[int]":
        return self._token_ids[self._num_prompt_tokens :]

    def is_beginning_of(self, request: NewRequest) -> bool:
        begins = request.token_ids[: len(self._token_ids)] == self._token_ids.tolist()
        return begins and (self.cache_salt, self._num_prompt_tokens) == (
            request.cache_salt,
            request.num_prompt_tokens,
        )

    def extend(self, token_ids: np.ndarray, generations: list[SuffixAutomaton]) -> None:
        """`token_ids` [n] int32 from the start; fewer than known when KV is computed again."""
        num_new = max(0, len(token_ids) - len(self._token_ids))
        if num_new:
            self._token_ids.frombytes(token_ids[-num_new:].tobytes())
        start = self._automaton.num_tokens
        for token_id in self._token_ids[start : start + _MAX_INDEXED_TOKENS]:
            self._automaton.append(token_id)
        before, self.matches = self.matches, {}
        for generation in generations:
            match = before.get(generation)
            if match is None or num_new > self._max_depth:
                match, num_unmatched = Match(), self._max_depth  # no match reaches further back
            else:
                num_unmatched = num_new
            for token_id in self._token_ids[max(0, len(self._token_ids) - num_unmatched) :]:
                generation.follow(match, token_id)
            self.matches[generation] = match

    def all_matches(self) -> list[tuple[SuffixAutomaton, Match]]:
        """With its own text, unless that is not all taken in, and with past outputs."""
        matches = list(self.matches.items())
        if self._automaton.num_tokens == len(self._token_ids):
            matches.insert(0, (self._automaton, self._automaton.match_own_ending()))
        return matches


class OutputStore:
    """Past outputs by salt. Every salt has the same room, whatever the others keep."""

    def __init__(
        self,
        max_depth: int,
        max_outputs: int,
        max_tokens_per_salt: int,
        max_tokens: int,
        max_salts: int,
    ):
        self._max_depth = max_depth
        self._max_outputs = max_outputs
        self._max_tokens_per_salt = max_tokens_per_salt
        self._max_tokens = max_tokens
        self._max_salts = max_salts
        self._by_salt: dict[str | None, PastOutputs] = {}  # least recently used first

    @property
    def num_salts(self) -> int:
        return len(self._by_salt)

    @property
    def num_tokens(self) -> int:
        return sum(outputs.num_tokens for outputs in self._by_salt.values())

    def get(self, cache_salt: str | None) -> "PastOutputs | None":
        outputs = self._by_salt.pop(cache_salt, None)
        if outputs is not None:
            self._by_salt[cache_salt] = outputs
        return outputs

    def add(self, cache_salt: str | None, output: "array[int]") -> None:
        """Keep `output`, int32 token ids, for requests of the same salt."""
        if not self._max_outputs or len(output) < 2:  # nothing follows a single token
            return
        outputs = self.get(cache_salt)
        if outputs is None:
            outputs = PastOutputs(self._max_depth, self._max_outputs, self._max_tokens_per_salt)
            self._by_salt[cache_salt] = outputs
        outputs.add(output)
        while self.num_salts > 1 and (
            self.num_salts > self._max_salts or self.num_tokens > self._max_tokens
        ):
            del self._by_salt[next(iter(self._by_salt))]


class PastOutputs:
    """Outputs of one salt in two generations: when the young one is full, the old one goes.

    So nothing is deleted from an automaton, and the latest text is kept: between half of
    `max_tokens` and all of it. Outputs enter in small portions; up to half as many tokens wait.
    """

    def __init__(self, max_depth: int, max_outputs: int, max_tokens: int):
        self.generations: list[SuffixAutomaton] = []  # the young one first
        self._max_depth = max_depth
        self._num_generations = min(2, max_outputs)
        self._max_young_outputs = max(1, max_outputs // 2)
        self._max_young_tokens = max(2, max_tokens // 2)
        self._num_young_outputs = 0
        self._queue: deque[array[int]] = deque()  # each closed by `_END_OF_OUTPUT`
        self._num_absorbed = 0  # tokens of the first in the queue

    @property
    def num_tokens(self) -> int:
        return self.num_queued_tokens + sum(kept.num_tokens for kept in self.generations)

    @property
    def num_queued_tokens(self) -> int:
        return sum(map(len, self._queue)) - self._num_absorbed

    def add(self, output: "array[int]") -> None:
        """Queue the end of `output`. What comes while the queue is full is lost."""
        output = output[-(self._max_young_tokens - 1) :]
        output.append(_END_OF_OUTPUT)
        if self.num_queued_tokens + len(output) <= self._max_young_tokens:
            self._queue.append(output)

    def absorb(self, num_tokens: int) -> None:
        """Move up to `num_tokens` tokens from the queue to the young generation."""
        while num_tokens > 0 and self._queue:
            output = self._queue[0]
            if self._num_absorbed == 0:
                if self._num_young_outputs == self._max_young_outputs:
                    self._begin_generation()
                self._num_young_outputs += 1
            portion = output[self._num_absorbed : self._num_absorbed + num_tokens]
            for token_id in portion:
                if not self.generations or self.generations[0].num_tokens == self._max_young_tokens:
                    self._begin_generation()
                    self._num_young_outputs = 1
                self.generations[0].append(token_id)
            num_tokens -= len(portion)
            self._num_absorbed += len(portion)
            if self._num_absorbed == len(output):
                self._queue.popleft()
                self._num_absorbed = 0

    def _begin_generation(self) -> None:
        young = SuffixAutomaton(self._max_depth)
        self.generations = [young, *self.generations][: self._num_generations]
        self._num_young_outputs = 0
