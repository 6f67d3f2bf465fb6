"""GenerationBody: the fields that chat and completions share, and what they mean to the engine."""

from typing import Annotated, Any, Literal

from pydantic import Field

from nano.errors import InvalidRequest
from nano.sampling_params import MAX_N, MAX_STOP_STRINGS
from nano.serve.openai.message import TextPart
from nano.serve.openai.parameters import Body, applied, neutral, refused

# One complaint per list: a million wrong entries must not become a million sentences.
Integers = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
ExtraArg = str | int | float
RequestId = Annotated[str, Field(pattern=r"^[!-~]{1,512}$")]  # as in a header
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

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
)


class StreamOptions(Body):
    include_usage: bool | None = applied("true or false: token counts in a last chunk")
    continuous_usage_stats: bool | None = applied(
        "true or false: token counts so far in every chunk; needs include_usage"
    )
    include_obfuscation: Literal[False] | None = neutral(
        "false", "streams are not padded against eavesdroppers; use TLS"
    )


class Speculative(Body):
    """What a request says about speculation. Names and limits are the engine's to check."""

    method: str | None = None
    methods: Strings | None = None
    num_tokens: int | None = None
    enabled: bool | None = None


class Prediction(Body):
    """OpenAI's Predicted Outputs: a text that much of the answer will repeat."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] = applied(
        "a text, or a list of parts of type text", ...
    )

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class TextFormat(Body):
    type: Literal["text"]


class GenerationBody(Body):
    """What chat and completions share."""

    model: str | None = applied("a name that /v1/models lists; null: the first of them")

    # What is sampled.
    n: int | None = applied(f"1 to {MAX_N}; completion i is sampled with seed + i")
    temperature: float | None = applied("[0, 1e6]; below 1e-5 is greedy")
    top_p: float | None = applied("(0, 1]")
    top_k: int | None = applied("-1 or more; -1 and 0 are off")
    min_p: float | None = applied("[0, 1]")
    seed: int | None = applied("[0, 2**63); null draws one, which the answer tells")
    presence_penalty: float | None = applied("[-2, 2]")
    frequency_penalty: float | None = applied("[-2, 2]")
    repetition_penalty: float | None = applied("[0.01, 100]")
    logit_bias: dict[str, float] | None = applied("token id -> [-100, 100]")
    allowed_token_ids: Integers | None = applied("token ids, at least one")
    bad_words: Strings | None = applied("words that the answer must not hold")
    vllm_xargs: dict[str, ExtraArg | Annotated[list[ExtraArg], Field(fail_fast=True)]] | None = (
        applied("what the server's --logits-processors read")
    )

    # Where it ends.
    max_tokens: int | None = applied("1 or more; an answer also ends with the context")
    min_tokens: int | None = applied("0 to max_tokens")
    stop: str | Strings | None = applied(f"a text, or up to {MAX_STOP_STRINGS} of them")
    stop_token_ids: Integers | None = applied("token ids")
    include_stop_str_in_output: bool | None = applied("true or false")
    ignore_eos: bool | None = applied("true or false")

    # The prompt.
    add_special_tokens: bool | None = applied(
        "true or false: what the model expects around a text (default: true for a prompt, false "
        "for a conversation, whose template writes it)"
    )
    truncate_prompt_tokens: int | None = applied(
        "1 or more: the prompt's tokens beyond are dropped; -1: those that do not fit"
    )
    truncation_side: Literal["left", "right"] | None = applied(
        "left (keeps the end of the prompt) or right; needs truncate_prompt_tokens"
    )
    cache_salt: str | None = applied("a text: the prompt's KV is shared within it only")

    # What is answered, and how.
    skip_special_tokens: bool | None = applied("true or false")
    prompt_logprobs: int | None = applied("-1 to the server's max_logprobs; not streamed")
    return_token_ids: bool | None = applied("true or false")
    return_tokens_as_token_ids: bool | None = applied(
        "true or false: tokens of log probabilities as token_id:17"
    )
    stream: bool | None = applied("true or false")
    stream_options: StreamOptions | None = applied("an object; needs stream")
    stream_interval: int | None = applied("1 or more: tokens per chunk after the first")

    # When.
    priority: int | None = applied(
        "an integer, lower is sooner; only 0 unless --scheduling-policy priority"
    )
    request_id: RequestId | None = applied(
        "up to 512 visible ASCII characters: X-Request-Id, and part of the answer's id"
    )
    timeout_ms: Milliseconds | None = applied("above 0: the whole answer takes no longer")
    max_queue_ms: Milliseconds | None = applied("above 0: the first token is computed by then")
    speculative: Speculative | None = applied("an object: method or methods, num_tokens, enabled")
    speculative_trace: bool | None = applied("true or false")
    prediction: Prediction | None = applied("an object: type content, content")

    user: str | None = neutral("any text")
    metadata: dict[str, str] | None = neutral("any texts by name")
    prompt_cache_key: str | None = neutral("any text")
    safety_identifier: str | None = neutral("any text")
    store: Literal[False] | None = neutral("false", "answers are not stored")
    service_tier: Literal["auto", "default"] | None = neutral(
        "auto or default", "all requests are served alike; priority orders them"
    )
    response_format: TextFormat | None = neutral(
        '{"type": "text"}', "structured outputs are not supported yet"
    )
    spaces_between_special_tokens: bool | None = neutral("true or false: tokens bring their own")
    use_beam_search: Literal[False] | None = neutral("false", "beam search is not supported")

    structured_outputs: None = refused("structured outputs are not supported yet")
    logprob_token_ids: None = refused("log probabilities of chosen tokens are not supported yet")
    repetition_detection: None = refused("repetition is not detected yet")
    thinking_token_budget: None = refused("thinking is not told apart from the answer yet")
    return_token_offsets: None = refused(
        "offsets of prompt tokens are not supported yet; echo with logprobs has text_offset"
    )
    session_id: None = refused("no sessions are kept: a request brings its whole prompt")
    kv_transfer_params: None = refused("KV is not transferred between engines")

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_always(self) -> bool:
        """Whether every chunk of the stream has the counts so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def shows_speculation(self) -> bool:
        """Whether the answer is to tell what came of it."""
        is_named = self.speculative is not None or self.prediction is not None
        return is_named or bool(self.speculative_trace)

    def sampling_values(self) -> dict[str, Any]:
        """The arguments of SamplingParams that were given. Raises `InvalidRequest`."""
        self._check_streaming()
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        values = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias:
            values["logit_bias"] = {_token_id(key): x for key, x in self.logit_bias.items()}
        if self.vllm_xargs:
            values["extra_args"] = self.vllm_xargs
        return values

    def prompt_options(self) -> dict[str, Any]:
        """What `InputProcessor.process` is told beyond prompt and sampling parameters."""
        speculative = None if self.speculative is None else self.speculative.model_dump()
        return {
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side,
            "speculative": speculative,
            "prediction": None if self.prediction is None else self.prediction.text,
            "speculative_trace": bool(self.speculative_trace),
            "stream_interval": 1 if self.stream_interval is None else self.stream_interval,
        }

    def spelling(self) -> dict[str, str]:
        """Names of SamplingParams -> the fields of this body that they came from."""
        return {"extra_args": "vllm_xargs"}

    def respelled(self, error: InvalidRequest) -> InvalidRequest:
        """`error` in the caller's words."""
        spelled = self.spelling().get(error.param or "")
        if spelled is None or error.param is None:
            return error
        message = str(error)
        # What a chat is turned into is still called the prompt, and a template has its own words.
        if error.param != "prompt" and message.startswith(error.param):
            message = message.replace(error.param, spelled, 1)
        return InvalidRequest(message, spelled, error.code)

    def _check_streaming(self) -> None:
        if not self.stream:
            for name in ("stream_options", "stream_interval"):
                if getattr(self, name) is not None:
                    raise InvalidRequest(f"{name} needs stream=true", name)
        elif self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs are not streamed", "prompt_logprobs")
        if self.includes_usage_always and not self.includes_usage:
            raise InvalidRequest(
                "stream_options: continuous_usage_stats needs include_usage=true", "stream_options"
            )


def _token_id(key: str) -> int:
    # As JSON writes a number: "05" would be a second name for the same token.
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and key == str(int(key))):
        raise InvalidRequest(f"logit_bias must have token ids as keys, got {key!r}", "logit_bias")
    return int(key)
