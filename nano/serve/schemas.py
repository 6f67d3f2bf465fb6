"""Request bodies of the OpenAI routes, with vLLM's extra fields. Unknown fields are refused.

A field is applied, or neutral: taken because clients send it and its allowed values change
nothing. A neutral field's type admits exactly those values, so anything else is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nano.errors import InvalidRequest
from nano.sampling_params import SamplingParams

Empty = Annotated[list[Any], Field(max_length=0)]

# Fields that go to SamplingParams as they are.
SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "seed",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


class Body(BaseModel):
    """Strict: no unknown field, no number from a string. null means not given, as in OpenAI."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None  # neutral
    continuous_usage_stats: Literal[False] | None = None  # neutral


class GenerationBody(Body):
    """What chat and completions share. Ranges are checked by `SamplingParams`."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    # Neutral.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def to_sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Raises `InvalidRequest`. `defaults` are the model's own sampling defaults."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream=true", "stream_options")
        values = dict(defaults)
        for name in SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        if self.logit_bias:
            values["logit_bias"] = {_token_id(key): x for key, x in self.logit_bias.items()}
        return SamplingParams(**values, **self._own_params())

    def _own_params(self) -> dict[str, Any]:
        """The SamplingParams that this route spells its own way."""
        raise NotImplementedError


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message. What a client copies back from an earlier answer may be there if it is empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Empty | None = None  # neutral, as all below
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Empty | None = None

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content or ""}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        return message


class TextFormat(Body):
    type: Literal["text"]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Neutral.
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Empty | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Empty | None = None
    function_call: Literal["none", "auto"] | None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: Literal["none"] | None = None

    def _own_params(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest(
                    f"max_completion_tokens {self.max_completion_tokens} and max_tokens "
                    f"{self.max_tokens} differ; give one of them",
                    "max_completion_tokens",
                )
        if self.top_logprobs is not None and self.top_logprobs != 0 and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    # Neutral.
    best_of: int | None = None
    suffix: None = None


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit():
        raise InvalidRequest(f"logit_bias must have token ids as keys, got {key!r}", "logit_bias")
    return int(key)
