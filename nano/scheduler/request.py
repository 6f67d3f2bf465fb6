"""Request: one prompt being continued, as the scheduler sees it. Only the scheduler writes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from nano.kv_cache.block_hash import BlockHash
from nano.outputs import FinishReason
from nano.sampling_params import SamplingParams
from nano.speculation import RequestSpeculation, SpeculationStats


class RequestStatus(Enum):
    """A preempted request is WAITING, with tokens already generated."""

    WAITING = "waiting"  # holds no blocks, the worker has no row for it
    RUNNING = "running"  # holds blocks; the worker has a row for it
    FINISHED = "finished"


_NO_WISHES = RequestSpeculation()


@dataclass(slots=True)
class InFlight:
    """A request's part of a step whose output is still to come. Counts are upper bounds: how many
    drafts were accepted, and how many were proposed then, only the worker knows.
    """

    num_tokens: int
    num_drafts: int  # of these
    samples: bool  # the step reaches the end of the known tokens
    num_preemptions: int  # of the request, when it was scheduled: what it computed then is lost
    num_asked: int = 0  # drafts that will be there afterwards
    draft_source: str = ""  # the first proposer that was asked for them


class Request:
    """A prompt, what was generated, and how much of that has valid KV.

    Holds: 0 <= num_computed_tokens <= num_tokens <= max_num_tokens, and there are drafts only if
    all tokens but the newest are computed. The `num_planned_...` say the same of the moment when
    the steps in flight will have ended. The arguments are those of one prompt of the front
    end, with n = 1; `max_tokens` None means the rest of the context. `deadline` is when it must
    have ended and `queue_deadline` when it must have begun, in seconds of the caller's clock.
    """

    __slots__ = (
        "arrival_index",
        "bad_words_token_ids",
        "block_hashes",
        "cache_salt",
        "deadline",
        "draft_source",
        "draft_token_ids",
        "eos_token_ids",
        "finish_reason",
        "first_scheduled_time",
        "has_reported",
        "in_flight",
        "max_draft_tokens",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_read",
        "num_verifications",
        "prediction_token_ids",
        "priority",
        "proposers",
        "queue_deadline",
        "request_id",
        "sampling_params",
        "speculation",
        "speculation_stats",
        "status",
        "stop_token_id",
        "token_ids",
        "traces_drafts",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        eos_token_ids: tuple[int, ...] = (),
        bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        speculation: RequestSpeculation = _NO_WISHES,
        prediction_token_ids: tuple[int, ...] = (),
        traces_drafts: bool = False,
        deadline: float | None = None,
        queue_deadline: float | None = None,
    ):
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.eos_token_ids = eos_token_ids
        self.bad_words_token_ids = bad_words_token_ids
        self.priority = priority
        self.cache_salt = cache_salt
        self.speculation = speculation
        self.prediction_token_ids = prediction_token_ids
        self.traces_drafts = traces_drafts
        self.deadline = deadline
        self.queue_deadline = queue_deadline

        self.token_ids = list(prompt_token_ids)  # prompt and accepted output, append-only
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0  # KV is valid for token_ids[:num_computed_tokens]
        self.draft_token_ids: list[int] = []  # guesses for the next step
        self.draft_source = ""  # whose they are
        self.in_flight: list[InFlight] = []  # its parts of steps without output, oldest first
        self.num_verifications = 0  # steps in which it sampled
        self.num_read: dict[str, int] = {}  # tokens that models with KV of their own were shown
        self.speculation_stats = SpeculationStats()
        self.block_hashes: list[BlockHash] = []  # of the first full blocks of token_ids
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None  # the stop_token_ids entry that ended it
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # read from the prefix cache before any preemption
        self.first_scheduled_time: float | None = None
        self.has_reported = False  # whether the front end has heard of it
        self.num_prompt_logprobs = 0  # delivered so far

        # Set by Scheduler.add, which knows the limits.
        self.max_num_tokens = 0  # prompt and output: the first of all limits to be met
        self.proposers: tuple[str, ...] = ()  # who may guess, the preferred one first
        self.max_draft_tokens = 0  # per step
        self.arrival_index = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.token_ids)

    @property
    def num_planned_tokens(self) -> int:
        """Known tokens once all that is in flight has ended, at most."""
        num_tokens = len(self.token_ids)
        if self.in_flight:
            num_tokens += sum(part.num_drafts + 1 for part in self.in_flight if part.samples)
        return num_tokens

    @property
    def num_planned_computed_tokens(self) -> int:
        """Tokens with KV then, at most."""
        num_tokens = self.num_computed_tokens
        if self.in_flight:
            num_tokens += sum(part.num_tokens for part in self.in_flight)
        return num_tokens

    @property
    def num_planned_drafts(self) -> int:
        """Guesses that the next step may verify, at most."""
        return self.in_flight[-1].num_asked if self.in_flight else len(self.draft_token_ids)

    @property
    def planned_draft_source(self) -> str:
        """Who makes those guesses, as far as is known."""
        return self.in_flight[-1].draft_source if self.in_flight else self.draft_source

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def urgency(self) -> tuple[int, int]:
        """Sorts the most urgent first: lower priority number, then earlier arrival."""
        return self.priority, self.arrival_index

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether KV may come from the cache. Prompt logprobs need every prompt token computed."""
        return self.sampling_params.prompt_logprobs is None

    def append(self, token_ids: Sequence[int]) -> int:
        """Append sampled tokens up to one that ends the request; the number kept.

        Sets `finish_reason` at the end: `stop` before `length` if one token is both.
        """
        for num_kept, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            if self._is_stop(token_id):
                self.finish_reason = FinishReason.STOP
                return num_kept
            if len(self.token_ids) >= self.max_num_tokens:
                self.finish_reason = FinishReason.LENGTH
                return num_kept
        return len(token_ids)

    def _is_stop(self, token_id: int) -> bool:
        params = self.sampling_params
        is_eos = token_id in self.eos_token_ids and not params.ignore_eos
        if not is_eos and token_id not in params.stop_token_ids:
            return False
        if self.num_output_tokens < params.min_tokens:
            return False
        self.stop_token_id = None if is_eos else token_id
        return True
