"""What the engine answers: tokens from the core, and what a caller gets back. Torch-free.

The caller's records have vLLM's names and shapes.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from nano.step import TokenLogprobs


class FinishReason(StrEnum):
    """Why a request ended. `stop` and `length` are OpenAI's."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context or of the KV cache
    ABORT = "abort"  # the caller went away
    ERROR = "error"  # this request failed; `error` says why


@dataclass(slots=True)
class TokenOutput:
    """The core's news of one request after a step; the front end makes text of it.

    Exactly one TokenOutput of each request has a finish_reason.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop_token_ids entry that ended it; None for EOS
    logprobs: TokenLogprobs | None = None  # of new_token_ids
    prompt_logprobs: TokenLogprobs | None = None  # further prompt tokens, from the second on
    num_cached_tokens: int | None = None  # set in the first output
    first_scheduled_time: float | None = None  # set in the first output; time.monotonic()
    error: str | None = None  # with finish_reason "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability. `rank` is 1 for the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One dict per token: token id -> Logprob. The chosen token is always among the keys, first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions. `text` and `token_ids` grow when streamed."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string; None for EOS
    seed: int | None = None  # the seed this completion was sampled with
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


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
