"""What a library caller may hand over as prompts, conversations and predictions. Torch-free.

A text, token ids, or a mapping in vLLM's shape is one prompt; a list of those is many. Anything
else is refused by name.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from nano.errors import InvalidRequest

# A text, token ids, or vLLM's {"prompt": ...} / {"prompt_token_ids": ...} (with "cache_salt").
Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Speculative = Mapping[str, Any]  # what `RequestSpeculation.parse` takes
Prediction = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or many, as many: a text, a mapping or a list of ints is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            "prompts must be a text, a list of token ids, a mapping or a list of these, "
            f"got {type(prompts).__name__}",
            "prompt",
        )
    if prompts and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return cast("Sequence[Prompt]", prompts)


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation or many, as many: a list of mappings is one."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(
            f"messages must be a list of messages, got {type(messages).__name__}", "messages"
        )
    if messages and isinstance(messages[0], Mapping):
        return [messages]
    conversations: list[Any] = list(messages)
    for conversation in conversations:
        if isinstance(conversation, str) or not isinstance(conversation, Sequence):
            raise InvalidRequest(
                f"a conversation must be a list of messages, got {conversation!r}", "messages"
            )
    return conversations


def with_text_content(conversation: Sequence[Message]) -> list[Message]:
    """Messages whose content is text, which is what templates print; as the server has it."""
    if not conversation:
        raise InvalidRequest("messages must hold at least one message, got 0", "messages")
    messages: list[Message] = []
    for message in conversation:
        content = message.get("content", "")
        if content is None and message.get("role") == "assistant":  # it may have been tool calls
            content = ""
        elif isinstance(content, list) and all(
            isinstance(part, Mapping) and part.get("type") == "text" for part in content
        ):
            content = "\n".join(part["text"] for part in content)
        elif not isinstance(content, str):
            raise InvalidRequest(
                f"content of a message must be a string or a list of text parts, got {content!r}",
                "messages",
            )
        messages.append({**message, "content": content})
    return messages


def unpack(prompt: Prompt) -> tuple[str | Sequence[int], str | None]:
    """(text or token ids, cache_salt)"""
    if not isinstance(prompt, Mapping):
        return prompt, None
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
        raise InvalidRequest(
            "a prompt mapping holds 'prompt' or 'prompt_token_ids', and perhaps 'cache_salt'; "
            f"got {sorted(prompt)}",
            "prompt",
        )
    content = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
    if "prompt" not in prompt and isinstance(content, str):
        raise InvalidRequest(
            f"prompt_token_ids must be a list of token ids, got {content!r}", "prompt_token_ids"
        )
    return content, prompt.get("cache_salt")


def predictions_per_prompt(given: Any, count: int) -> Iterable[Any]:
    """One prediction for every prompt, or a list with one, or None, each."""
    is_token_ids = isinstance(given, Sequence) and (not given or isinstance(given[0], int))
    if is_token_ids:  # an empty list predicts nothing, for all
        return itertools.repeat(given, count)
    return per_prompt("prediction", given, count)


def per_prompt(name: str, given: Any, count: int) -> Iterable[Any]:
    """`given` once per prompt; a list must have exactly one entry each."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return itertools.repeat(given, count)
    if len(given) != count:
        raise InvalidRequest(f"{name} has {len(given)} entries for {count} prompts", name)
    return given
