"""The answers that requests get."""

from nano.serve.openai.chat_reply import ChatReply
from nano.serve.openai.completion_reply import CompletionReply
from nano.serve.openai.openai_reply import OpenAIReply

__all__ = ["ChatReply", "CompletionReply", "OpenAIReply"]
