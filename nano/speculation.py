"""What a request may say about speculation, and what it is told of it. Torch-free records.

Proposers are names here: what stands behind one is known in `nano/spec/` alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nano.errors import InvalidRequest

TARGET = "target"  # the source of a token that no proposer had guessed


@dataclass(frozen=True, slots=True)
class ProposerInfo:
    """A loaded proposer as the control plane sees it."""

    name: str
    num_tokens: int  # most drafts per request and step
    is_free: bool  # guesses from text alone, in microseconds; the others run a model
    needs_prediction: bool = False  # serves only requests that bring the text to guess from
    # Of a model: seconds of one pass over one token of one request; measured again as it runs.
    pass_seconds: float = 0.0
    has_own_kv: bool = False  # it must read a request's tokens before it can guess


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """A caller's wishes. The engine's own options are the default, and the limit.

    methods     names of loaded proposers, the preferred one first; None is all that are loaded
    num_tokens  most drafts per step; None is each proposer's own number
    enabled     False: no drafts at all
    """

    methods: tuple[str, ...] | None = None
    num_tokens: int | None = None
    enabled: bool = True

    @classmethod
    def parse(cls, given: object) -> "RequestSpeculation":
        """From {"method" | "methods", "num_tokens", "enabled"}. Raises `InvalidRequest`."""
        if isinstance(given, RequestSpeculation):
            return given
        if not isinstance(given, Mapping):
            raise _refusal(f"must be an object, got {given!r}")
        unknown = set(given) - {"method", "methods", "num_tokens", "enabled"}
        if unknown:
            raise _refusal(f"has no field {sorted(map(str, unknown))[0]!r}")
        if given.get("method") is not None and given.get("methods") is not None:
            raise _refusal("takes method or methods, not both")
        num_tokens, enabled = given.get("num_tokens"), given.get("enabled")
        if num_tokens is not None and (type(num_tokens) is not int or num_tokens < 0):
            raise _refusal(f"num_tokens must be an integer of at least 0, got {num_tokens!r}")
        if enabled is not None and not isinstance(enabled, bool):
            raise _refusal(f"enabled must be true or false, got {enabled!r}")
        return cls(_methods(given), num_tokens, True if enabled is None else enabled)


@dataclass(slots=True)
class DraftRecord:
    """One verified step of a request: what was guessed, by whom, and what came of it."""

    step: int  # of the engine
    proposer: str
    draft_token_ids: list[int]
    token_ids: list[int]  # accepted drafts and one of the target's own


@dataclass(slots=True)
class ProposerStats:
    """Of one proposer. Lists are indexed by position in the draft."""

    num_drafts: int = 0  # steps in which it had guesses that were verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_offered_per_pos: list[int] = field(default_factory=list)
    num_accepted_per_pos: list[int] = field(default_factory=list)

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Add one verified draft."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        while len(self.num_offered_per_pos) < num_drafts:
            self.num_offered_per_pos.append(0)
            self.num_accepted_per_pos.append(0)
        for position in range(num_drafts):
            self.num_offered_per_pos[position] += 1
            self.num_accepted_per_pos[position] += position < num_accepted

    @property
    def acceptance_rate(self) -> float | None:
        if not self.num_draft_tokens:
            return None
        return self.num_accepted_tokens / self.num_draft_tokens


@dataclass(slots=True)
class SpeculationStats:
    """Of one request, or of an engine since its start."""

    num_steps: int = 0  # in which it sampled
    num_tokens: int = 0  # that these steps gave
    by_proposer: dict[str, ProposerStats] = field(default_factory=dict)

    def count(self, proposer: str, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """Add one step that sampled, of whose accepted drafts and one more `num_tokens` are kept:
        a stop may have cut them off."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        if not num_drafts:
            return
        if num_tokens <= num_accepted:  # as if no more were drafted
            num_drafts = num_accepted = num_tokens
        self.by_proposer.setdefault(proposer, ProposerStats()).count(num_drafts, num_accepted)

    def counters(self) -> dict[str, float]:
        """Under vLLM's names, as Prometheus writes them; per proposer and position, too.

        Acceptance at a position is to be taken of the drafts *offered* there, which vLLM does not
        export: `..._num_draft_tokens_per_pos`.
        """
        counts: dict[str, float] = {}

        def add(name: str, label: str, value: int) -> None:
            key = f"spec_decode_{name}{label}"
            counts[key] = counts.get(key, 0) + value

        for proposer, stats in self.by_proposer.items():
            for label in ("", f'{{proposer="{proposer}"}}'):
                add("num_drafts", label, stats.num_drafts)
                add("num_draft_tokens", label, stats.num_draft_tokens)
                add("num_accepted_tokens", label, stats.num_accepted_tokens)
            for position, offered in enumerate(stats.num_offered_per_pos):
                label = f'{{position="{position}"}}'
                add("num_draft_tokens_per_pos", label, offered)
                add("num_accepted_tokens_per_pos", label, stats.num_accepted_per_pos[position])
        return counts

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per step of the target: 1 without speculation."""
        return self.num_tokens / self.num_steps if self.num_steps else None


def _methods(given: Mapping[str, Any]) -> tuple[str, ...] | None:
    if given.get("method") is not None:
        methods: Any = [given["method"]]
    elif given.get("methods") is not None:
        methods = given["methods"]
    else:
        return None
    if not isinstance(methods, (list, tuple)) or not all(isinstance(m, str) for m in methods):
        raise _refusal(f"methods must be a list of names, got {methods!r}")
    if not methods:
        raise _refusal("methods must not be empty; enabled=false turns speculation off")
    return tuple(dict.fromkeys(methods))


def _refusal(why: str) -> InvalidRequest:
    return InvalidRequest(f"speculative {why}", "speculative")
