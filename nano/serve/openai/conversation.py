"""ConversationBody: how messages become a prompt, for every route that takes them."""

from collections.abc import Sequence
from typing import Any

from nano.engine.tokenizer import Tokenizer
from nano.errors import InvalidRequest
from nano.serve.openai.message import ChatMessage, Empty
from nano.serve.openai.parameters import Body, applied, neutral

# What a template gets from elsewhere, and our own arguments beside it.
RESERVED_VARIABLES = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "tools",
    "template",
    "chat_template",
    "self",
)


class ConversationBody(Body):
    """Fields that steer the chat template."""

    add_generation_prompt: bool | None = applied(
        "true (default) or false: the template begins the assistant's message"
    )
    continue_final_message: bool | None = applied(
        "true or false: the answer goes on where the last message ends; excludes "
        "add_generation_prompt"
    )
    chat_template: str | None = applied(
        "the name of one of the model's templates; Jinja text only under "
        "--trust-request-chat-template"
    )
    chat_template_kwargs: dict[str, Any] | None = applied("variables that the template reads")
    documents: list[dict[str, Any]] | None = applied("objects, for a template that reads them")
    tools: Empty | None = neutral("[]", "tool calls are not supported yet")

    def render(
        self, tokenizer: Tokenizer, messages: Sequence[ChatMessage], trusts_templates: bool
    ) -> str:
        """The prompt. Raises `InvalidRequest`, with the template's own words if it refuses."""
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        template, given = self.chat_template, self.chat_template_kwargs or {}
        for name in RESERVED_VARIABLES:
            if name in given:
                raise InvalidRequest(
                    f"chat_template_kwargs must not hold {name!r}", "chat_template_kwargs"
                )
        if template is not None and not (trusts_templates or template in tokenizer.template_names):
            # The sandbox keeps it from Python, but nothing ends the loops that it may hold.
            raise InvalidRequest(
                "chat_template must name one of the model's templates "
                f"({', '.join(tokenizer.template_names) or 'it has none'}); the server takes "
                "others only with --trust-request-chat-template",
                "chat_template",
            )
        variables = given if self.documents is None else {**given, "documents": self.documents}
        try:
            return tokenizer.apply_chat_template(
                [message.to_template() for message in messages],
                self.add_generation_prompt is not False and not continues,
                template,
                continue_final_message=continues,
                **variables,
            )
        except InvalidRequest as error:
            if error.param in given:
                raise InvalidRequest(
                    f"chat_template_kwargs: {error}", "chat_template_kwargs"
                ) from None
            raise
