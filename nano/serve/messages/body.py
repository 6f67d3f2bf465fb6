"""MessagesBody and CountTokensBody: the request bodies of Anthropic's Messages API.

A text where the API also takes a list of blocks is the list of one block that it stands for.
"""

from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from nano.errors import InvalidRequest
from nano.sampling_params import MAX_STOP_STRINGS
from nano.serve.adapter import AS_IN_CHAT, AdapterBody, only_types, or_text
from nano.serve.openai.body import Strings
from nano.serve.openai.chat_body import ChatBody
from nano.serve.openai.message import ChatMessage, Empty, TextPart
from nano.serve.openai.parameters import Body, applied, neutral, refused

Role = Literal["user", "assistant", "system"]


class MessagesChat(ChatBody):
    """The chat that a message answers, with errors about it in the words of the Messages API."""

    def spelling(self) -> dict[str, str]:
        return {**super().spelling(), "prompt": "messages", "stop": "stop_sequences"}


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = neutral("a mark: every prefix is cached")
    citations: Empty | None = neutral("[]", "citations cannot be told to the model")


def _as_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


Blocks = Annotated[
    list[Annotated[TextBlock, only_types("text")]],
    Field(fail_fast=True),
    or_text(_as_block, str | list[TextBlock]),
]


class InputMessage(Body):
    role: Role
    content: Blocks


Messages = Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]


class Metadata(Body):
    user_id: str | None = None


class Thinking(Body):
    type: Literal["disabled"]


class ToolChoice(Body):
    type: Literal["none", "auto"]
    disable_parallel_tool_use: bool | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens: a conversation."""

    model: str | None = applied(AS_IN_CHAT)
    messages: Messages = applied("messages of text", ...)
    system: Blocks | None = applied("a text, or blocks of text: a system message in front")

    cache_control: CacheControl | None = neutral("a mark: every prefix is cached")
    thinking: Thinking | None = neutral("an object of type disabled", "thinking is not set apart")
    tools: Empty | None = neutral("[]", "tools are not supported")
    tool_choice: ToolChoice | None = neutral(
        "an object of type none or auto", "tools are not supported"
    )
    speed: Literal["standard"] | None = neutral("standard")
    output_config: None = refused("only plain text is generated, at one effort")

    def to_chat(self) -> MessagesChat:
        return MessagesChat(**self.conversation())

    def conversation(self) -> dict[str, Any]:
        """The fields of a chat that its prompt is made from.

        What one side says in a row is one message in this API, and an answer goes on where the
        assistant's last message ends.
        """
        turns: list[tuple[Role, list[TextBlock]]] = []
        if self.system is not None:
            turns.append(("system", self.system))
        for role, messages in groupby(self.messages, key=lambda message: message.role):
            turns.append((role, [block for message in messages for block in message.content]))
        return {
            "messages": [
                ChatMessage(role=role, content=[TextPart(type="text", text=b.text) for b in blocks])
                for role, blocks in turns
            ],
            "continue_final_message": turns[-1][0] == "assistant",
        }


class MessagesBody(CountTokensBody, AdapterBody):
    """POST /v1/messages."""

    max_tokens: int = applied("1 or more; an answer also ends with the context", ...)
    temperature: float | None = applied("[0, 1]; below 1e-5 is greedy")
    top_p: float | None = applied(AS_IN_CHAT)
    top_k: int | None = applied(AS_IN_CHAT)
    stop_sequences: Strings | None = applied(f"up to {MAX_STOP_STRINGS} texts")
    stream: bool | None = applied("true or false")

    metadata: Metadata | None = neutral("user_id: a string")
    service_tier: Literal["auto", "standard_only"] | None = neutral("auto, standard_only")

    container: None = refused("there are no containers")
    diagnostics: None = refused("there are none")
    inference_geo: None = refused("everything is computed here")
    mcp_servers: Empty | None = neutral("[]", "tools are not supported")

    def to_chat(self) -> MessagesChat:
        """Raises `InvalidRequest`."""
        if self.temperature is not None and not 0 <= self.temperature <= 1:
            raise InvalidRequest(
                f"temperature must be in [0, 1], got {self.temperature}", "temperature"
            )
        return MessagesChat(
            **self.conversation(),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            **self.extensions(),
        )
