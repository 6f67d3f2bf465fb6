"""SamplingParams: what a caller may ask for. Validated once, when it is made.

Torch-free. Names, defaults and meanings are vLLM's. A value is applied exactly or refused here;
limits that need a model (vocabulary size, context length) are checked by the front end.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nano.errors import InvalidRequest

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_INT32 = 2**31 - 1
# Below this, softmax(logits / T) is argmax to within float32: the request is greedy (vLLM's rule).
GREEDY_TEMPERATURE = 1e-5


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequest(f"{name} must be a number, got {value!r}", name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    inside = (low < number if open_low else low <= number) and number <= high
    if not math.isfinite(number) or not inside:
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low}, {high}], got {value}", name)
    return number


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {value}", name)
    return value


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list of token ids, got {value!r}", name)
    return tuple(_integer(name, token_id, 0, MAX_INT32) for token_id in value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Iterable):
        raise InvalidRequest(f"{name} must be a string or a list of strings, got {value!r}", name)
    strings = tuple(items)
    for item in strings:
        if not isinstance(item, str):
            raise InvalidRequest(f"{name} must hold strings only, got {item!r}", name)
        if not item:
            raise InvalidRequest(f"{name} must not hold an empty string", name)
        check_text(name, item)
    return strings


def _json_like(name: str, value: object) -> Any:
    """A copy of what JSON can say and a message carries. Raises `InvalidRequest`."""
    if isinstance(value, str):
        check_text(name, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        _integer(name, value, -(2**63), 2**63 - 1)
    elif isinstance(value, (list, tuple)):
        return [_json_like(name, item) for item in value]
    elif isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidRequest(f"{name} must have strings as keys, got {key!r}", name)
            check_text(name, key)
        return {key: _json_like(name, item) for key, item in value.items()}
    elif value is not None and not isinstance(value, (bool, float)):
        raise InvalidRequest(f"{name} must hold what JSON can say, got {value!r}", name)
    return value


def check_text(name: str, text: str) -> None:
    """Refuse lone surrogates: JSON can write them, but no message between processes holds them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name} holds the lone surrogate {text[error.start]!r} at character {error.start}, "
            "which is not text",
            name,
        ) from error


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens of one request are chosen and when it ends.

    Raises `InvalidRequest` (a `ValueError`) naming the field, the value and the limit.

    temperature         0 is greedy; values under 1e-5 count as 0.
    top_p, top_k, min_p truncate the distribution; `top_k` 0 or -1 is off. Ties at a cut are kept.
    presence_penalty, frequency_penalty   count generated tokens only (OpenAI).
    repetition_penalty  counts prompt and generated tokens (Hugging Face).
    logit_bias          token id -> bias in [-100, 100].
    allowed_token_ids   nothing else can be sampled.
    bad_words           never complete any of these words, with or without a leading space.
    min_tokens          no stop token and no stop string before this many generated tokens.
    max_tokens          most generated tokens; None is the rest of the context.
    seed                in [0, 2**63); None draws one (recorded in the output).
    n                   completions; child i uses `seed + i`.
    logprobs            top alternatives per generated token; -1 is the whole vocabulary.
    prompt_logprobs     the same for each prompt token.
    extra_args          name -> value, as JSON; what custom logits processors make of it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # normalising our own fields, once

        put("n", _integer("n", self.n, 1, MAX_N))
        put("temperature", _number("temperature", self.temperature, 0.0, 1e6))
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        put("top_k", max(0, _integer("top_k", self.top_k, -1, MAX_INT32)))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put(
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
        )
        put("logit_bias", self._checked_bias())
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")
        put("bad_words", _strings("bad_words", self.bad_words))
        put("min_tokens", _integer("min_tokens", self.min_tokens, 0, MAX_INT32))
        if self.max_tokens is not None:
            put("max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_INT32))
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), "
                    f"got {self.min_tokens}",
                    "min_tokens",
                )
        put("stop", _strings("stop", self.stop))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", "stop"
            )
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, 0, 2**63 - 1))
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                put(name, _integer(name, value, -1, MAX_INT32))
        if self.extra_args is not None:
            if not isinstance(self.extra_args, Mapping):
                raise InvalidRequest(
                    f"extra_args must map names to values, got {self.extra_args!r}", "extra_args"
                )
            put("extra_args", _json_like("extra_args", self.extra_args) or None)
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(
                    f"{name} must be true or false, got {getattr(self, name)!r}", name
                )

    def _checked_bias(self) -> dict[int, float] | None:
        if not self.logit_bias:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}", "logit_bias"
            )
        return {
            _integer("logit_bias", token_id, 0, MAX_INT32): _number(
                "logit_bias", bias, -100.0, 100.0
            )
            for token_id, bias in self.logit_bias.items()
        }

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def needs_token_counts(self) -> bool:
        """Whether any penalty looks at the tokens seen so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )
