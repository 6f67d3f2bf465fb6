"""ResponsesBody: POST /v1/responses."""

from typing import Annotated, Literal

from pydantic import Field

from nano.errors import InvalidRequest
from nano.serve.adapter import AS_IN_CHAT, AdapterBody
from nano.serve.openai.body import TextFormat
from nano.serve.openai.chat_body import ChatBody
from nano.serve.openai.message import ChatMessage, Empty
from nano.serve.openai.parameters import Body, applied, neutral, refused
from nano.serve.responses.items import Items

LOGPROBS = "message.output_text.logprobs"
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Include = Annotated[list[Includable], Field(fail_fast=True)]


class ResponsesChat(ChatBody):
    """The chat that a response is, with errors about it in the words of the Responses API."""

    def spelling(self) -> dict[str, str]:
        names = {"messages": "input", "prompt": "input", "max_tokens": "max_output_tokens"}
        return {**super().spelling(), **names}


class TextSettings(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Literal["none"] | None = None
    summary: None = None


class StreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(AdapterBody):
    """POST /v1/responses."""

    model: str | None = applied(AS_IN_CHAT)
    input: Items = applied("a text, or items: messages of text, function calls, their outputs", ...)
    instructions: str | None = applied("a text: a system message in front")
    max_output_tokens: int | None = applied("1 or more; an answer also ends with the context")
    temperature: float | None = applied(AS_IN_CHAT)
    top_p: float | None = applied(AS_IN_CHAT)
    top_k: int | None = applied(AS_IN_CHAT)
    include: Include | None = applied(
        f"{LOGPROBS}; reasoning.encrypted_content is neutral: there is none"
    )
    top_logprobs: int | None = applied(f"0 to the server's max_logprobs; needs {LOGPROBS}")
    metadata: dict[str, str] | None = applied("texts by name, which the answer repeats")
    stream: bool | None = applied("true or false")

    stream_options: StreamOptions | None = neutral("include_obfuscation: false")
    text: TextSettings | None = neutral("a format of type text", "only plain text is generated")
    tools: Empty | None = neutral("[]", "tools are not supported")
    tool_choice: Literal["none", "auto"] | None = neutral("none, auto", "tools are not supported")
    parallel_tool_calls: bool | None = neutral("a boolean")
    max_tool_calls: int | None = neutral("an integer")
    reasoning: Reasoning | None = neutral("effort: none", "reasoning is not set apart")
    user: str | None = neutral("a string")
    safety_identifier: str | None = neutral("a string")
    prompt_cache_key: str | None = neutral("a string")
    prompt_cache_retention: Literal["in_memory"] | None = neutral(
        "in_memory", "the prefix cache keeps what fits, for as long as it fits"
    )
    service_tier: Literal["auto", "default"] | None = neutral("auto, default")
    truncation: Literal["disabled"] | None = neutral("disabled", "a long input is not cut")
    store: Literal[False] | None = neutral("false", "answers are not kept")
    background: Literal[False] | None = neutral("false", "answers are not kept")

    previous_response_id: None = refused("answers are not kept; send the conversation as input")
    conversation: None = refused("conversations are not kept; send all of it as input")
    prompt: None = refused("prompts are not kept; send the text as input")
    context_management: None = refused("a conversation is computed as it is sent")
    prompt_cache_options: None = refused("the prefix cache keeps what fits, and has no options")
    background_options: None = refused("answers are not kept")
    moderation: None = refused("nothing here moderates")
    image: None = refused("only text is read")
    access_programs: None = refused("there are none")

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def to_chat(self) -> ResponsesChat:
        """Raises `InvalidRequest`."""
        if self.top_logprobs and not self.shows_logprobs:
            raise InvalidRequest(f"top_logprobs needs include to hold {LOGPROBS!r}", "top_logprobs")
        messages = [item.to_chat() for item in self.input]
        if self.instructions is not None:
            messages.insert(0, ChatMessage(role="system", content=self.instructions))
        return ResponsesChat(
            messages=messages,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            logprobs=self.shows_logprobs,
            top_logprobs=self.top_logprobs,
            **self.extensions(),
        )
