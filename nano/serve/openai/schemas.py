"""The bodies that requests have, and which route takes which."""

from nano.serve.openai.body import (
    GenerationBody,
    Prediction,
    Speculative,
    StreamOptions,
    TextFormat,
)
from nano.serve.openai.chat_body import ChatBody
from nano.serve.openai.completion_body import CompletionBody
from nano.serve.openai.message import ChatMessage, Empty, TextPart
from nano.serve.openai.parameters import Body

__all__ = [
    "Body",
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "Empty",
    "GenerationBody",
    "Prediction",
    "Speculative",
    "StreamOptions",
    "TextFormat",
    "TextPart",
]
