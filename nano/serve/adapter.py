"""What the adapters share. An adapter is a route of another API that is served as a chat: its body
makes a `ChatBody`, and from there on there is one path.
"""

from collections.abc import Callable
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from nano.serve.openai.body import Milliseconds, Prediction, Speculative
from nano.serve.openai.parameters import Body, applied

AS_IN_CHAT = "as in /v1/chat/completions"


class AdapterBody(Body):
    """What nano takes beyond an API's own fields, on every adapter alike."""

    min_p: float | None = applied(AS_IN_CHAT)
    seed: int | None = applied(AS_IN_CHAT)
    speculative: Speculative | None = applied(AS_IN_CHAT)
    prediction: Prediction | None = applied(AS_IN_CHAT)
    cache_salt: str | None = applied(AS_IN_CHAT)
    priority: int | None = applied(AS_IN_CHAT)
    timeout_ms: Milliseconds | None = applied(AS_IN_CHAT)
    max_queue_ms: Milliseconds | None = applied(AS_IN_CHAT)

    def extensions(self) -> dict[str, Any]:
        """Those of them that were given, as arguments of `ChatBody`."""
        given = {name: getattr(self, name) for name in AdapterBody.model_fields}
        return {name: value for name, value in given.items() if value is not None}


def only_types(*types: str) -> BeforeValidator:
    """For an entry of a list that has a `type`, the first of `types` if it does not say: others are
    refused before their fields are read.
    """

    def check(entry: Any) -> Any:
        found = entry.get("type", types[0]) if isinstance(entry, dict) else types[0]
        if found not in types:
            context = {"found": f"{found!r:.60}", "served": ", ".join(types)}
            raise PydanticCustomError("refused", "type {found} is not one of {served}", context)
        return entry

    return BeforeValidator(check)


def or_text(as_entry: Callable[[str], dict[str, Any]], schema: Any) -> BeforeValidator:
    """For a list that may also be given as a text, which stands for a list of one entry. `schema`
    is the type of both.
    """

    def check(given: Any) -> Any:
        if isinstance(given, str):
            return [as_entry(given)]
        if not isinstance(given, list):
            raise PydanticCustomError("list_type", "Input should be a string or a list")
        return given

    return BeforeValidator(check, json_schema_input_type=schema)
