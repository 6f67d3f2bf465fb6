"""SuffixAutomaton: every substring of a growing text, how often it occurs and what follows it.

Built online in amortised constant time per token (Blumer et al. 1985, "The smallest automaton
recognizing the subwords of a text"). A state stands for the substrings that end at the same places:
suffixes of one another, of consecutive lengths. Its link leads to the state of the next shorter
ones, which end at more places. So the endings of the text are the states on one path of links.
"""

from array import array
from dataclasses import dataclass

NO_STATE = -1
_NO_TOKEN = -(2**31)


@dataclass(slots=True)
class Match:
    """An ending of some text that is a substring of an automaton's: the last `length` tokens."""

    state: int = 0
    length: int = 0


class SuffixAutomaton:
    """One text. Negative tokens separate independent parts of it, and are never drafted.

    Matches are at most `max_depth` tokens long, and counts are exact for substrings of up to one
    token more: as many links are walked for them per token. A match stays valid as the text grows.
    Some 170 bytes per token where little repeats.
    """

    def __init__(self, max_depth: int):
        self.num_tokens = 0
        self._max_depth = max_depth
        # Per state. State 0 is the root: the empty string.
        self._lengths = array("i", [0])  # of its longest substring
        self._links = array("i", [NO_STATE])
        self._counts = array("i", [0])  # places where it ends; not of the root
        # Most states have one continuation. The most frequent one, of several the latest, is here,
        self._tokens = array("i", [_NO_TOKEN])
        self._targets = array("i", [NO_STATE])
        self._others: dict[int, dict[int, int]] = {}  # and the rest by token
        self._last = 0  # the state of the whole text
        self._ending = Match()  # the longest ending that may match

    @property
    def num_states(self) -> int:
        return len(self._links)

    def append(self, token_id: int) -> None:
        """Grow the text by a token. Amortised O(1), and O(max_depth) for the counts."""
        self.num_tokens += 1
        lengths, links = self._lengths, self._links
        state, new = self._last, self._add_state(self.num_tokens)
        self._last = new
        while state != NO_STATE and (target := self._step(state, token_id)) == NO_STATE:
            self._lead(state, token_id, new)
            state = links[state]
        if state == NO_STATE:
            links[new] = 0
        elif lengths[state] + 1 == lengths[target]:
            links[new] = target
        else:
            # Some substrings of `target` now end at one place more than its others: split them off.
            part = self._add_state(lengths[state] + 1)
            self._copy_continuations(target, part)
            links[part], links[target], links[new] = links[target], part, part
            while state != NO_STATE and self._step(state, token_id) == target:
                self._lead(state, token_id, part)
                state = links[state]
        self._count(token_id)

    def follow(self, match: Match, token_id: int) -> None:
        """Make `match`, of any text, the match of that text with one token more."""
        self._settle(match)
        state = match.state
        while (target := self._step(state, token_id)) == NO_STATE and state:
            state = self._links[state]
            match.length = self._lengths[state]
        match.state = max(target, 0)
        match.length = match.length + 1 if target != NO_STATE else 0
        self._settle(match)

    def match_own_ending(self) -> Match:
        """The longest ending of the text that also occurs before, perhaps overlapping itself."""
        ending = self._ending
        if self._counts[ending.state] > 1:
            return Match(ending.state, ending.length)
        # Its link leads to substrings that end at other places, too.
        shorter = max(self._links[ending.state], 0)
        return Match(shorter, self._lengths[shorter])

    def draft(self, match: Match, num_tokens: int, min_prob: float) -> tuple[list[int], float]:
        """What most often follows `match`, token by token, and how many of these to expect right.

        The probability of a token is how often it follows the `max_depth` tokens before it, or the
        fewer that match, among all that follow. What only ends the text goes on as its longest
        ending that occurs before. Drafts end before the product of probabilities falls under
        `min_prob`, and after `num_tokens`.
        """
        drafts: list[int] = []
        prob, num_expected = 1.0, 0.0
        endings = self._endings()  # the last place of these has no continuation yet
        at = Match(match.state, match.length)
        self._settle(at)
        while len(drafts) < num_tokens:
            if self._tokens[at.state] == _NO_TOKEN and at.state:
                at.state = self._links[at.state]
                at.length = self._lengths[at.state]
            token_id = self._tokens[at.state]
            if at.state == 0 or token_id < 0:
                break
            num_followed = self._counts[at.state] - (at.state in endings)
            target = self._targets[at.state]
            prob *= self._counts[target] / num_followed
            if prob < min_prob:
                break
            drafts.append(token_id)
            num_expected += prob
            at.state, at.length = target, at.length + 1
            self._settle(at)
        return drafts, num_expected

    def _step(self, state: int, token_id: int) -> int:
        if self._tokens[state] == token_id:
            return self._targets[state]
        others = self._others.get(state)
        return NO_STATE if others is None else others.get(token_id, NO_STATE)

    def _lead(self, state: int, token_id: int, target: int) -> None:
        """Let `token_id` lead from `state` to `target`."""
        if self._tokens[state] in (token_id, _NO_TOKEN):
            self._tokens[state], self._targets[state] = token_id, target
        else:
            self._others.setdefault(state, {})[token_id] = target

    def _add_state(self, length: int) -> int:
        self._lengths.append(length)
        self._links.append(NO_STATE)
        self._counts.append(0)
        self._tokens.append(_NO_TOKEN)
        self._targets.append(NO_STATE)
        return len(self._links) - 1

    def _copy_continuations(self, state: int, to_state: int) -> None:
        self._counts[to_state] = self._counts[state]
        self._tokens[to_state] = self._tokens[state]
        self._targets[to_state] = self._targets[state]
        if state in self._others:
            self._others[to_state] = dict(self._others[state])

    def _count(self, token_id: int) -> None:
        """Count the newest token at every ending that it has just continued."""
        counts, tokens, targets = self._counts, self._tokens, self._targets
        ending = self._ending
        state, counted = ending.state, NO_STATE
        while state != NO_STATE:
            target = self._step(state, token_id)
            if target != counted:  # several states may lead to one
                counts[target] += 1
                counted = target
            favourite = tokens[state]
            if favourite != token_id and counts[target] >= counts[targets[state]]:
                others = self._others[state]
                del others[token_id]
                others[favourite] = targets[state]
                tokens[state], targets[state] = token_id, target
            state = self._links[state]
        ending.state = self._step(ending.state, token_id)
        ending.length += 1
        self._settle(ending)

    def _endings(self) -> set[int]:
        """The states of all endings of the text that may match."""
        states, state = set(), self._ending.state
        while state > 0:
            states.add(state)
            state = self._links[state]
        return states

    def _settle(self, match: Match) -> None:
        """Cut to `max_depth`, and find the state again: it may have been split since."""
        match.length = min(match.length, self._max_depth)
        while match.state and self._lengths[self._links[match.state]] >= match.length:
            match.state = self._links[match.state]
