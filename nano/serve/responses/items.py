"""Items: the conversation that a response goes on from, in the forms of OpenAI's Responses API.

A text where the API also takes a list is the list of one entry that it stands for.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from nano.serve.adapter import only_types, or_text
from nano.serve.openai.message import ChatMessage, Empty, FunctionCall, Part, TextPart, ToolCall
from nano.serve.openai.parameters import Body, neutral


class InputPart(Body):
    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = neutral("anything")

    # What a part of an earlier answer brings with it.
    annotations: Empty | None = neutral("[]", "annotations cannot be told to the model")
    logprobs: list[Any] | None = neutral("anything")


def _as_part(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


Parts = Annotated[
    list[Annotated[InputPart, only_types("input_text", "output_text")]],
    Field(fail_fast=True),
    or_text(_as_part, str | list[InputPart]),
]


class Item(Body):
    """Something that was said before: written by the caller, or copied back from an answer."""

    id: str | None = neutral("any text")
    status: Literal["in_progress", "completed", "incomplete"] | None = neutral("any of its values")


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = neutral("any of its values")

    def to_chat(self) -> ChatMessage:
        return ChatMessage(role=self.role, content=_text_parts(self.content))


class FunctionCallItem(Item):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def to_chat(self) -> ChatMessage:
        function = FunctionCall(name=self.name, arguments=self.arguments)
        call = ToolCall(id=self.call_id, function=function)
        return ChatMessage(role="assistant", tool_calls=[call])


class FunctionOutputItem(Item):
    """What came of it."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts

    def to_chat(self) -> ChatMessage:
        parts = _text_parts(self.output)
        return ChatMessage(role="tool", content=parts, tool_call_id=self.call_id)


def _text_parts(parts: list[InputPart]) -> list[Part]:
    return [TextPart(type="text", text=part.text) for part in parts]


def _item_type(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else "message"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")],
    Discriminator(_item_type),
]


def _as_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


Items = Annotated[
    list[Annotated[AnyItem, only_types("message", "function_call", "function_call_output")]],
    Field(min_length=1, fail_fast=True),
    or_text(_as_message, str | list[AnyItem]),
]
