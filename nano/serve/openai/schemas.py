"""Request bodies of the OpenAI routes, with vLLM's extra fields. Unknown fields are refused.

A field is applied, or neutral: taken because clients send it and its allowed values change
nothing. A neutral field's type admits exactly those values, so anything else is refused by name.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nano.errors import InvalidRequest

Empty = Annotated[list[Any], Field(max_length=0)]
# One complaint per list: a million wrong entries must not become a million sentences.
Integers = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
ExtraArg = str | int | float

MAX_CHOICES = 4096  # of one call: its prompts times n

# Fields that are SamplingParams' own. Their ranges are checked there.
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
    """Strict: no unknown field, no number made from a string. null means not given (OpenAI)."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None  # neutral
    continuous_usage_stats: Literal[False] | None = None  # neutral


class TextPart(Body):
    type: Literal["text"]
    text: str


class Speculative(Body):
    """What a request says about speculation. Names and limits are the engine's to check."""

    method: str | None = None
    methods: Strings | None = None
    num_tokens: int | None = None
    enabled: bool | None = None


class Prediction(Body):
    """OpenAI's Predicted Outputs: a text that much of the answer will repeat."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class GenerationBody(Body):
    """What chat and completions share."""

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
    allowed_token_ids: Integers | None = None
    bad_words: Strings | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Integers | None = None
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
    cache_salt: str | None = None
    priority: int | None = None
    speculative: Speculative | None = None
    speculative_trace: bool | None = None
    prediction: Prediction | None = None  # OpenAI has it on chat only
    vllm_xargs: dict[str, ExtraArg | Annotated[list[ExtraArg], Field(fail_fast=True)]] | None = None

    # Neutral.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_values(self) -> dict[str, Any]:
        """The arguments of SamplingParams that were given. Raises `InvalidRequest`."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream=true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs are not streamed", "prompt_logprobs")
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        values = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias:
            values["logit_bias"] = {_token_id(key): x for key, x in self.logit_bias.items()}
        if self.vllm_xargs:
            values["extra_args"] = self.vllm_xargs
        return values

    def speculative_values(self) -> dict[str, Any] | None:
        """What `RequestSpeculation.parse` takes."""
        return None if self.speculative is None else self.speculative.model_dump()

    def prediction_text(self) -> str | None:
        return None if self.prediction is None else self.prediction.text

    @property
    def shows_speculation(self) -> bool:
        """Whether the answer is to tell what came of it."""
        is_named = self.speculative is not None or self.prediction is not None
        return is_named or bool(self.speculative_trace)

    def spelling(self) -> dict[str, str]:
        """Names of SamplingParams -> the fields of this body that they came from."""
        return {"extra_args": "vllm_xargs"}

    def respelled(self, error: InvalidRequest) -> InvalidRequest:
        """`error` in the caller's words."""
        spelled = self.spelling().get(error.param or "")
        if spelled is None or error.param is None:
            return error
        message = str(error)
        if error.param != "prompt":  # what a chat is turned into is still called the prompt
            message = message.replace(error.param, spelled, 1)
        return InvalidRequest(message, spelled, error.code)


class ChatMessage(Body):
    """One message. What a client copies back from an earlier answer may be there if empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    # Neutral.
    tool_calls: Empty | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Empty | None = None

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates expect it. Raises `InvalidRequest`."""
        content = self.content
        if content is None and self.role != "assistant":  # whose content may have been tool calls
            raise InvalidRequest(f"a {self.role} message must have content, got null", "messages")
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

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
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
    reasoning_effort: Literal["none"] | None = None

    def sampling_values(self) -> dict[str, Any]:
        values = super().sampling_values()
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise InvalidRequest(
                    f"max_completion_tokens ({self.max_completion_tokens}) and max_tokens "
                    f"({self.max_tokens}) differ; give one of them",
                    "max_completion_tokens",
                )
            values["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
        return values

    def template_variables(self) -> dict[str, Any]:
        """chat_template_kwargs, less what the template gets from the messages themselves."""
        variables = self.chat_template_kwargs or {}
        for name in ("messages", "add_generation_prompt", "template", "self"):
            if name in variables:
                raise InvalidRequest(
                    f"chat_template_kwargs must not hold {name!r}", "chat_template_kwargs"
                )
        return variables

    def spelling(self) -> dict[str, str]:
        names = {**super().spelling(), "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Strings | Integers | Annotated[list[Integers], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: int | None = None

    # Neutral.
    best_of: int | None = None
    suffix: None = None

    @property
    def scores_only(self) -> bool:
        """Whether the prompt is all that is wanted: echo with max_tokens=0."""
        return bool(self.echo) and self.max_tokens == 0

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids. Raises `InvalidRequest` for none or too many."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt must not be empty, got []", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        n = 1 if self.n is None else self.n
        if len(prompt) * n > MAX_CHOICES:
            raise InvalidRequest(
                f"prompt times n must be at most {MAX_CHOICES} in one call, got {len(prompt)} "
                f"prompts with n = {n}",
                "prompt",
            )
        return prompt

    def sampling_values(self) -> dict[str, Any]:
        values = super().sampling_values()
        n = 1 if self.n is None else self.n
        if self.best_of not in (None, 1, n):
            raise InvalidRequest(f"best_of must be 1 or n ({n}), got {self.best_of}", "best_of")
        if self.scores_only:
            values["max_tokens"] = 1  # computed, and left out of the answer
        if self.logprobs is None:
            return values
        values["logprobs"] = self.logprobs
        if self.echo:
            if self.stream and n > 1:
                # The prompt's log probabilities come with the first completion only.
                raise InvalidRequest("echo with logprobs and n > 1 is not streamed", "echo")
            values.setdefault("prompt_logprobs", self.logprobs)
        return values

    def spelling(self) -> dict[str, str]:
        names = super().spelling()
        if self.prompt_logprobs is None:
            names["prompt_logprobs"] = "logprobs"
        return names


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise InvalidRequest(f"logit_bias must have token ids as keys, got {key!r}", "logit_bias")
    return int(key)
