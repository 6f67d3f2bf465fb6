"""ChatBody: POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Field

from nano.engine.tokenizer import Tokenizer
from nano.errors import InvalidRequest
from nano.serve.openai.body import GenerationBody
from nano.serve.openai.conversation import ConversationBody
from nano.serve.openai.message import ChatMessage, Empty
from nano.serve.openai.parameters import applied, neutral, refused

Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class ChatBody(GenerationBody, ConversationBody):
    messages: Messages = applied("messages of text, tools' answers and the assistant's calls", ...)
    max_completion_tokens: int | None = applied(
        "max_tokens under its newer name, which holds if both are given"
    )
    logprobs: bool | None = applied("true or false")
    top_logprobs: int | None = applied("0 to the server's max_logprobs; needs logprobs")
    echo: bool | None = applied(
        "true or false: the answer begins with the last message, which must be the assistant's"
    )

    modalities: list[Literal["text"]] | None = neutral('["text"]', "answers are text")
    tool_choice: Literal["none", "auto"] | None = neutral(
        "none or auto", "tool calls are not supported yet"
    )
    parallel_tool_calls: bool | None = neutral("true or false: there are no tool calls yet")
    functions: Empty | None = neutral("[]", "tool calls are not supported yet")
    function_call: Literal["none", "auto"] | None = neutral(
        "none or auto", "tool calls are not supported yet"
    )
    reasoning_effort: Literal["none"] | None = neutral(
        "none", "reasoning is not told apart from the answer yet"
    )
    include_reasoning: Literal[True] | None = neutral(
        "true", "reasoning is not told apart from the answer yet"
    )
    verbosity: Literal["medium"] | None = neutral("medium", "the model knows no other")
    prompt_cache_retention: Literal["in_memory"] | None = neutral(
        "in_memory", "the prefix cache keeps what fits, for as long as it fits"
    )

    audio: None = refused("answers are text")
    moderation: None = refused("nothing here moderates")
    prompt_cache_options: None = refused("the prefix cache keeps what fits, and has no options")
    web_search_options: None = refused("the server does not search the web")
    return_prompt_text: None = refused(
        "not supported yet; /tokenize with return_token_strs shows the prompt"
    )

    def sampling_values(self) -> dict[str, Any]:
        values = super().sampling_values()
        if self.max_completion_tokens is not None:
            values["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", "top_logprobs")
        if self.echo and self.messages[-1].role != "assistant":
            raise InvalidRequest(
                "echo repeats the last message, which must be the assistant's, got "
                f"{self.messages[-1].role}",
                "echo",
            )
        return values

    @property
    def echoed_text(self) -> str:
        """What the answer begins with."""
        return (self.messages[-1].text() or "") if self.echo else ""

    def prompt(self, tokenizer: Tokenizer, trusts_templates: bool = False) -> str:
        """The conversation as the model reads it. Takes a while; raises `InvalidRequest`."""
        return self.render(tokenizer, self.messages, trusts_templates)

    def spelling(self) -> dict[str, str]:
        names = {**super().spelling(), "prompt": "messages", "logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names
