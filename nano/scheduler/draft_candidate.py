"""DraftCandidate: what the policy is told of a request that may be given drafts."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A request that may get drafts in the next step."""

    request_id: str
    proposers: tuple[str, ...]  # that it may use, the preferred one first
    max_tokens: int  # at least 1: its own cap, and its room
    num_expected: int = 64  # tokens it may still be going to have
    # Tokens that models with KV of their own would have to read first, by proposer.
    num_unread: Mapping[str, int] = field(default_factory=dict)
