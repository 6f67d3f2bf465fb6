"""LogitsProcessor: a class of the user's own that edits logits, request by request.

`LogitsProcessors` owns the instances of an engine, and the promise that a mistake in one of them
ends the request in whose row it shows, and no other. Where they stand among the other edits is
written in `logits.py`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nano.config import EngineConfig, load_class
from nano.errors import ConfigError
from nano.model_input.request_states import LogitsEdit
from nano.sampling_params import SamplingParams

# (output_ids, logits) -> logits, or (prompt_ids, output_ids, logits) -> logits
RequestLogitsProcessor = Callable[..., Tensor]


class LogitsProcessor(ABC):
    """To be derived from, and listed in `LLM(logits_processors=[...])` or `--logits-processors`.

    The shape is that of vLLM's AdapterLogitsProcessor. One instance serves all requests of an
    engine; what it edits is said per request, by `SamplingParams.extra_args` (`vllm_xargs` over
    HTTP) or any other parameter. The class is imported by the front end, too, which calls nothing
    but `validate_params`.
    """

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        """`config` is resolved; `device` is where logits lie. Called once, before weights load."""
        self.config = config
        self.device = device

    @classmethod  # noqa: B027  # may be left out
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise `ValueError` to refuse a request: its text is the answer (HTTP status 400)."""

    def is_argmax_invariant(self) -> bool:
        """Whether the best token always stays the best: then greedy requests do without it."""
        return False

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """A function that edits the rows of one request; None leaves them alone.

        It is called as f(output_ids, logits), or f(prompt_ids, output_ids, logits) if it has three
        arguments without a default, and returns logits of the same shape and dtype: the given
        tensor, edited in place, or another. output_ids: what is generated before this row's token.
        logits: [V] float32 (as the model computes), a copy of the row.

        It must be a pure function of these arguments. Drafts are verified many rows at a time, some
        rows are computed twice and some for nothing: a draft model's rows are edited by it as well,
        a rejected draft's row looks back on tokens that never came, and a preempted request starts
        with a new function. What it keeps from call to call would tell these apart.
        """


class ProcessorFailed(Exception):
    """A processor's mistake; the text says whose and what."""


class LogitsProcessors:
    """The processors of an engine, in the order in which they are listed and applied."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        """Raises `ConfigError` for a class that cannot be found, used or made."""
        self._processors = [
            (named if isinstance(named, str) else named.__qualname__, _make(named, config, device))
            for named in config.model.logits_processors
        ]

    def start(self, params: SamplingParams, prompt_token_ids: list[int]) -> tuple[LogitsEdit, ...]:
        """What the rows of a new request are edited by. They raise `ProcessorFailed`.

        A mistake made here shows when the first row is sampled.
        """
        edits = []
        for name, processor in self._processors:
            try:
                if params.is_greedy and processor.is_argmax_invariant():
                    continue
                function = processor.new_req_logits_processor(params)
                if function is not None:
                    edits.append(_Edit(name, _bind(function, prompt_token_ids)))
            except Exception as error:
                edits.append(_Edit(name, _raiser(error)))
        return tuple(edits)


@dataclass(frozen=True, slots=True)
class _Edit:
    """One request's function of one processor, its results checked."""

    name: str
    function: Callable[[list[int], Tensor], Any]  # what it returns is to be seen

    def __call__(self, output_ids: list[int], logits: Tensor) -> Tensor:
        shape, dtype = logits.shape, logits.dtype
        try:
            edited = self.function(output_ids, logits)
        except Exception as error:
            raise ProcessorFailed(f"logits processor {self.name} raised {error!r}") from error
        if not isinstance(edited, Tensor):
            what = type(edited).__name__
        elif edited.shape != shape or edited.dtype != dtype:
            what = f"{list(edited.shape)} {edited.dtype}"
        elif not edited.amax() < torch.inf:  # nor NaN, which amax hands on
            what = "NaN or +infinity"
        else:
            return edited
        raise ProcessorFailed(
            f"logits processor {self.name} returned {what}; it must be {list(shape)} {dtype}, "
            "without NaN and +infinity"
        )


def _make(named: str | type, config: EngineConfig, device: torch.device) -> LogitsProcessor:
    kind = load_class(named)
    if not issubclass(kind, LogitsProcessor):
        raise ConfigError(f"logits_processors: {named!r} is not derived from nano.LogitsProcessor")
    try:
        return kind(config, device, False)
    except Exception as error:
        raise ConfigError(f"logits_processors: {named!r} cannot be made: {error!r}") from error


def _bind(function: RequestLogitsProcessor, prompt_token_ids: list[int]) -> LogitsEdit:
    """`function` without the prompt among its arguments. Raises whatever is wrong with it."""
    arguments = inspect.signature(function).parameters.values()
    required = [
        argument
        for argument in arguments
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 3:
        return lambda output_ids, logits: function(prompt_token_ids, output_ids, logits)
    return function


def _raiser(error: Exception) -> LogitsEdit:
    def fail(output_ids: list[int], logits: Tensor) -> Tensor:
        raise error

    return fail
