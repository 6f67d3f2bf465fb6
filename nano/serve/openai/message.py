"""ChatMessage: one message of a conversation, in every form that OpenAI's API knows.

What a client copies back from an earlier answer may be there if empty. Forms that a text model
cannot be told are refused in words.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from nano.errors import InvalidRequest
from nano.serve.openai.parameters import Body, applied, neutral, refused

Empty = Annotated[list[Any], Field(max_length=0)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(Body):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = neutral("anything")


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = TextPart | RefusalPart


class FunctionCall(Body):
    name: str
    arguments: str
    parsed_arguments: Any = neutral("anything: arguments as a client's helper read them")


class ToolCall(Body):
    """A call that the assistant made earlier. Templates want its arguments as an object."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = neutral("any integer: its place among the calls of a stream")

    def to_template(self) -> dict[str, Any]:
        """Raises `InvalidRequest`."""
        arguments = self.function.arguments
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise InvalidRequest(
                f"messages: the arguments of tool call {self.id!r} must be a JSON object, "
                f"got {arguments[:60]!r}",
                "messages",
            )
        function = {"name": self.function.name, "arguments": parsed}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(Body):
    role: Role
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = applied(
        "a text, or a list of parts of type text (of the assistant's, also refusal)"
    )
    name: str | None = None
    tool_call_id: str | None = None  # which call a tool answers
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    annotations: Empty | None = neutral("[]", "annotations cannot be told to the model")
    parsed: None = refused("what a client's helper made of the text is not told: send content")
    audio: None = refused("audio is not supported")
    function_call: None = refused("function_call is deprecated: send tool_calls")

    @model_validator(mode="after")
    def _belongs_to_its_role(self) -> Self:
        if self.role != "assistant":
            for name in ("tool_calls", "refusal"):
                if getattr(self, name):
                    raise _misplaced(name, "the assistant")
            if isinstance(self.content, list) and any(
                isinstance(part, RefusalPart) for part in self.content
            ):
                raise _misplaced("refusal parts", "the assistant")
        if self.role != "tool" and self.tool_call_id is not None:
            raise _misplaced("tool_call_id", "tools")
        return self

    def text(self) -> str | None:
        """What was said, None if nothing."""
        content = self.content
        parts = content if isinstance(content, list) else []
        texts = [content] if isinstance(content, str) else [part.text for part in parts]
        if self.refusal:
            texts.append(self.refusal)
        return "\n".join(texts) if texts or content is not None else None

    def to_template(self) -> dict[str, Any]:
        """The message as chat templates expect it. Raises `InvalidRequest`."""
        text = self.text()
        if text is None and self.role != "assistant":  # whose content may have been tool calls
            raise InvalidRequest(f"a {self.role} message must have content, got null", "messages")
        message: dict[str, Any] = {"role": self.role, "content": text or ""}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        return message


def _misplaced(what: str, role: str) -> PydanticCustomError:
    words = {"what": what, "role": role}
    return PydanticCustomError("misplaced", "only messages of {role} have {what}", words)
