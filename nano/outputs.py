"""What the engine answers: tokens from the core, and what a caller gets back. Torch-free.

The caller's records have vLLM's names and shapes.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from nano.speculation import TARGET, DraftRecord, ProposerStats, SpeculationStats
from nano.step import TokenLogprobs


class FinishReason(StrEnum):
    """Why a request ended. `stop` and `length` are OpenAI's."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context or of the KV cache
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # this request failed; `error` says why
    TIMEOUT = "timeout"  # its deadline passed
    QUEUE_TIMEOUT = "queue_timeout"  # its deadline passed before any of it was computed


LATE = (FinishReason.TIMEOUT, FinishReason.QUEUE_TIMEOUT)


@dataclass(slots=True)
class TokenOutput:
    """The core's news of one request after a step; the front end makes text of it.

    Exactly one TokenOutput of each request has a finish_reason. A prompt that takes several steps
    is news when the first of them is done: there are no tokens yet.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop_token_ids entry that ended it; None for EOS
    logprobs: TokenLogprobs | None = None  # of new_token_ids
    prompt_logprobs: TokenLogprobs | None = None  # further prompt tokens, from the second on
    num_cached_tokens: int | None = None  # set until the first token: it may grow with each chunk
    first_scheduled_time: float | None = None  # set in the first output; time.monotonic()
    error: str | None = None  # with finish_reason "error"
    draft: DraftRecord | None = None  # the step's, if the request traces them
    speculation: SpeculationStats | None = None  # of the whole request, set in the last output


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability. `rank` is 1 for the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dict per token: token id -> Logprob. The chosen token is always among the keys, first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class SpeculationReport:
    """What was in force for one completion, and what came of it.

    enabled             what the request said
    num_tokens          most drafts per step of each method in force, the preferred one first
    prediction_methods  of those, the ones that guess from the request's `prediction`
    stats               over the completion's own tokens: what a stop string cut off is not counted
    """

    enabled: bool
    num_tokens: dict[str, int]
    prediction_methods: tuple[str, ...] = ()
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.num_tokens)

    @property
    def num_accepted_prediction_tokens(self) -> int:
        return sum(stats.num_accepted_tokens for stats in self._prediction_stats())

    @property
    def num_rejected_prediction_tokens(self) -> int:
        drafted = sum(stats.num_draft_tokens for stats in self._prediction_stats())
        return drafted - self.num_accepted_prediction_tokens

    def count(self, num_tokens: int, record: DraftRecord | None) -> None:
        """Add one step that sampled, of which the completion has the first `num_tokens` tokens."""
        record = record or DraftRecord(0, "", [], [0])
        num_drafts, num_accepted = len(record.draft_token_ids), len(record.token_ids) - 1
        self.stats.count(record.proposer, num_drafts, num_accepted, num_tokens)

    def _prediction_stats(self) -> list[ProposerStats]:
        by_proposer = self.stats.by_proposer
        return [by_proposer[name] for name in self.prediction_methods if name in by_proposer]


@dataclass(frozen=True, slots=True)
class RejectedDraft:
    """A draft that the target overruled. Those behind it fell unjudged: they are only counted."""

    step: int
    position: int  # of the sampled token in the output
    draft_token_id: int
    sampled_token_id: int
    source: str  # the proposer
    num_unjudged: int


@dataclass(slots=True)
class SpeculationTrace:
    """Where a completion's tokens came from, and which drafts did not become tokens.

    Entry i of `sources` and `steps` is of token i: the proposer that had guessed it or "target",
    and the engine's step.
    """

    sources: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    rejected: list[RejectedDraft] = field(default_factory=list)

    def append(self, later: "SpeculationTrace") -> None:
        """Add the trace of the tokens that follow."""
        self.sources += later.sources
        self.steps += later.steps
        self.rejected += later.rejected

    def add(self, num_tokens: int, position: int, record: DraftRecord) -> None:
        """Add the first `num_tokens` tokens of one step, which the output has from `position` on.

        A draft counts as rejected only if the token sampled instead is among them.
        """
        num_accepted = len(record.token_ids) - 1
        num_guessed = min(num_accepted, num_tokens)
        self.sources += [record.proposer] * num_guessed + [TARGET] * (num_tokens - num_guessed)
        self.steps += [record.step] * num_tokens
        num_drafts = len(record.draft_token_ids)
        if num_accepted < min(num_drafts, num_tokens):
            self.rejected.append(
                RejectedDraft(
                    step=record.step,
                    position=position + num_accepted,
                    draft_token_id=record.draft_token_ids[num_accepted],
                    sampled_token_id=record.token_ids[num_accepted],
                    source=record.proposer,
                    num_unjudged=num_drafts - num_accepted - 1,
                )
            )


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions. `text` and `token_ids` grow when streamed.

    Completions compare equal however they were speculated: that is the promise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string; None for EOS
    seed: int | None = None  # the seed this completion was sampled with
    error: str | None = None
    # Once finished, if the engine has any proposer or the request asked.
    speculative: SpeculationReport | None = field(default=None, compare=False)
    # Of `token_ids`, if the request asked.
    speculative_trace: SpeculationTrace | None = field(default=None, compare=False)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, later: "CompletionOutput") -> None:
        """Add what is new since: both then read as one output, as if nobody had looked between."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        if self.speculative_trace is not None and later.speculative_trace is not None:
            self.speculative_trace.append(later.speculative_trace)
        for name in _LATEST:
            setattr(self, name, getattr(later, name))


# What a completion's outputs tell of the whole of it: the latest one holds.
_LATEST = ("cumulative_logprob", "finish_reason", "stop_reason", "seed", "error", "speculative")


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that computed one of its tokens."""
        if self.first_scheduled_time is None:
            return None
        return self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        if self.first_token_time is None:
            return None
        return self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt.

    `num_cached_tokens` is how many prompt tokens were read from the prefix cache (of the first
    completion). `prompt_logprobs[0]` is None: nothing precedes the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None

    def append(self, later: "RequestOutput") -> None:
        """Add the next output of the same request, of those that hold only what is new."""
        completions = {completion.index: completion for completion in self.outputs}
        for completion in later.outputs:
            earlier = completions.get(completion.index)
            if earlier is None:
                self.outputs.append(completion)
            else:
                earlier.append(completion)
        self.finished = later.finished
        self.prompt_logprobs = later.prompt_logprobs
        self.num_cached_tokens = later.num_cached_tokens
        self.metrics = later.metrics
