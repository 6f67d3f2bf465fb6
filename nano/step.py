"""The contract between scheduler and worker: what to compute, and what came of it.

Plain records of ints and lists: torch-free, picklable, replayable. `StepPlan` is the whole truth
a worker gets; it never sees a `Request`.
"""

from dataclasses import dataclass, field

from nano.sampling_params import SamplingParams

DRAFT_ON_DEVICE = -1  # in place of a draft: one that the worker has made, and knows


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities of consecutive tokens, one entry per token.

    Entry i of `token_ids` and `logprobs` starts with the token itself, then the asked-for top
    alternatives in falling order (the token may appear again among them). `ranks[i]` is the
    token's own rank, 1 = most likely.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Ask `proposer` for up to `num_tokens` drafts after this step.

    Of several for one request, the first that has any guess is the one that counts.
    """

    proposer: str
    num_tokens: int


@dataclass(slots=True)
class NewRequest:
    """A request the worker has no row for: sent on admission, and again after preemption."""

    request_id: str
    token_ids: list[int]  # every known token: prompt and accepted output
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams  # seed is never None here
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    cache_salt: str | None = None  # text is guessed from no other salt's
    prediction_token_ids: tuple[int, ...] = ()  # what the caller thinks will come
    proposers: tuple[str, ...] = ()  # that may ever guess for it
    num_verifications: int = 0  # steps that sampled so far, before any preemption too


@dataclass(slots=True)
class StepPlan:
    """One step. Request order is the order of `num_scheduled_tokens`."""

    step: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # the heart
    # The last len(d) of those tokens are drafts; a request without drafts is absent. Of those that
    # are all DRAFT_ON_DEVICE the worker takes as many as it has.
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    # Before this step. More than the worker counted means that new blocks hold KV of others. Absent
    # for a request whose step before is in flight and verifies drafts: only the worker knows.
    num_computed_tokens: dict[str, int] = field(default_factory=dict)
    new_requests: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)  # append to known rows
    # Forget these rows before anything else: since the last plan they have finished, were aborted,
    # or were preempted and will come again as new requests.
    finished_request_ids: list[str] = field(default_factory=list)
    preempted_request_ids: list[str] = field(default_factory=list)
    draft_requests: dict[str, tuple[DraftRequest, ...]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())

    @property
    def is_empty(self) -> bool:
        return not self.num_scheduled_tokens


@dataclass(slots=True)
class StepOutput:
    """What a step produced, in the order of its batch. Lists run parallel to `request_ids`."""

    request_ids: list[str]
    token_ids: list[list[int]]  # accepted drafts and one more; [] while known tokens remain
    # Proposed for the next step; all DRAFT_ON_DEVICE if the worker keeps them to itself.
    draft_token_ids: list[list[int]]
    draft_sources: list[str]  # the proposer of those, "" if there are none
    # What stood for DRAFT_ON_DEVICE, by request.
    verified_token_ids: dict[str, list[int]] = field(default_factory=dict)
    # The first draft of each request that had some, but none of them in the plan.
    unverified_token_ids: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)  # of token_ids
    # Prompt tokens num_computed + 1 ... of this step's chunk, for requests that asked.
    prompt_logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # requests that failed, and why
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    draft_seconds: float = 0.0  # of the proposers that run a model
    num_draft_passes: int = 0  # of such models, and
    num_draft_pass_tokens: int = 0  # tokens in these passes, of which
    num_caught_up_tokens: int = 0  # had been known for longer: a prompt, or steps without drafts


def num_tokens_of(plan: StepPlan, output: StepOutput) -> int:
    """Tokens that the step computed: of drafts that the plan did not know, those there were."""
    found = output.verified_token_ids
    num_missing = sum(len(plan.draft_token_ids[r]) - len(drafts) for r, drafts in found.items())
    return plan.num_tokens - num_missing
