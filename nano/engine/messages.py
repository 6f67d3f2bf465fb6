"""What front end and core say to each other. Plain records; `codec.py` puts them on the wire."""

from dataclasses import dataclass, field
from typing import Literal

from nano.outputs import TokenOutput
from nano.sampling_params import SamplingParams
from nano.speculation import ProposerInfo, RequestSpeculation


@dataclass(slots=True)
class EngineRequest:
    """One prompt to continue. `sampling_params` has n = 1 and a seed: the front end fans out."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float  # time.monotonic() seconds
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0  # lower is more urgent
    cache_salt: str | None = None
    speculation: RequestSpeculation = field(default_factory=RequestSpeculation)
    prediction_token_ids: tuple[int, ...] = ()  # what the caller thinks will come
    traces_drafts: bool = False  # each step's drafts are wanted in its TokenOutput
    # time.monotonic() seconds, the same clock in every process of a machine. Past them the core
    # ends the request: when it must have ended, and when a token of it must have been computed.
    deadline: float | None = None
    queue_deadline: float | None = None


@dataclass(slots=True)
class AddRequests:
    requests: list[EngineRequest]


@dataclass(slots=True)
class AbortRequests:
    request_ids: list[str]


@dataclass(slots=True)
class ControlRequest:
    """A maintenance call, answered by a `ControlReply` of the same `call_id`."""

    call_id: int
    method: Literal["reset_prefix_cache", "stats", "shutdown"]


@dataclass(slots=True)
class EngineOutputs:
    outputs: list[TokenOutput] = field(default_factory=list)


@dataclass(slots=True)
class ControlReply:
    call_id: int
    result: dict[str, float]


@dataclass(slots=True)
class EngineReady:
    """The core has loaded its model and takes requests. What the front end must know of it."""

    max_model_len: int
    num_blocks: int
    block_size: int
    token_budget: int
    numerics_id: str
    proposers: tuple[ProposerInfo, ...] = ()  # in the order of preference
    is_exact: bool = False  # no bit of a request's results depends on what it is computed with
    max_num_requests: int = 256  # most requests running at once

    @property
    def num_kv_slots(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.num_blocks * self.block_size


@dataclass(slots=True)
class EngineHeartbeat:
    """Sent by a thread of the core. `step_started` is None while idle (time.monotonic())."""

    step_started: float | None
    predicted_step_seconds: float


@dataclass(slots=True)
class EngineFailure:
    """The core is dead: every request it holds fails with `error`."""

    error: str


ToCore = AddRequests | AbortRequests | ControlRequest
FromCore = EngineOutputs | ControlReply | EngineReady | EngineHeartbeat | EngineFailure
