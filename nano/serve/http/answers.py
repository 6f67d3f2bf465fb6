"""What answers look like: the schemas of the OpenAPI page. Nothing is computed from them.

Answers are made by the `Reply` of each API. Fields that come only when asked for are left out here;
those named here always come.
"""

from typing import Any, Literal

from pydantic import BaseModel


class Empty(BaseModel):
    pass


class Version(BaseModel):
    version: str


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Logprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Logprob):
    top_logprobs: list[Logprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class Choice(BaseModel):
    index: int
    finish_reason: str
    stop_reason: int | str | None
    seed: int | None


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextBlock(BaseModel):
    type: Literal["text"]
    text: str


class MessageUsage(BaseModel):
    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


class Message(BaseModel):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(BaseModel):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class ResponseObject(BaseModel):
    """POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class Tokens(BaseModel):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    """POST /detokenize."""

    prompt: str


def answers(model: type[BaseModel], streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """`responses=` of a route that answers so, or with server-sent events on request."""
    answer: dict[str, Any] = {"model": model, "description": "The answer"}
    if streams:
        answer["description"] = "The answer; server-sent events with `stream`"
        answer["content"] = {"text/event-stream": {"schema": {"description": "Events"}}}
    return {200: answer}
