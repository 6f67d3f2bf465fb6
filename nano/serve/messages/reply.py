"""MessagesReply: the answer of the Messages API, made from the answer of a chat."""

from collections.abc import Iterator, Sequence

from nano.engine.input_processor import PreparedRequest
from nano.outputs import RequestOutput
from nano.serve.http.errors import describe
from nano.serve.messages.errors import anthropic_error
from nano.serve.openai.chat_reply import ChatReply
from nano.serve.reply import Event, Json, Reply


class MessagesReply(Reply):
    """A message: one block, which holds the text of the chat's only choice."""

    def __init__(self, chat: ChatReply, head: Json, prepared: PreparedRequest):
        """`head` is what every body of the answer has: id, created, model, system_fingerprint."""
        self._chat = chat
        self._num_prompt_tokens = len(prepared.prompt_token_ids)
        self._max_tokens = prepared.sampling_params.max_tokens
        self._message = {
            "id": head["id"],
            "type": "message",
            "role": "assistant",
            "model": head["model"],
            "system_fingerprint": head["system_fingerprint"],
            "seed": prepared.sampling_params.seed,
        }
        self._end: Json = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (choice,) = self._chat.whole(outputs)["choices"]
        content = [{"type": "text", "text": choice["message"]["content"]}]
        return {**self._message, "content": content, **self._ending(choice), "usage": self._usage()}

    def opening(self) -> Iterator[Event]:
        # What the cache holds of the prompt is not known yet; message_delta has the final counts.
        usage = _usage(self._num_prompt_tokens, 0, 0)
        message = {**self._message, "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**message, "usage": usage})
        block = {"type": "text", "text": ""}
        yield _event("content_block_start", index=0, content_block=block)
        yield _event("ping")

    def news(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        for event in self._chat.news(prompt_index, output):
            assert not isinstance(event.data, str)
            (choice,) = event.data["choices"]
            if choice["delta"].get("content"):
                delta = {"type": "text_delta", "text": choice["delta"]["content"]}
                yield _event("content_block_delta", index=0, delta=delta)
            if choice["finish_reason"] is not None:
                self._end = self._ending(choice)

    def closing(self) -> Iterator[Event]:
        yield _event("content_block_stop", index=0)
        yield _event("message_delta", delta=self._end, usage=self._usage())
        yield _event("message_stop")

    def failure(self, error: Exception) -> Iterator[Event]:
        yield Event(anthropic_error(*describe(error)), "error")

    def _ending(self, choice: Json) -> Json:
        reason, sequence = "end_turn", None
        if choice["finish_reason"] == "length":
            is_limit = self._chat.usage.completion_tokens == self._max_tokens
            reason = "max_tokens" if is_limit else "model_context_window_exceeded"
        elif isinstance(choice["stop_reason"], str):
            reason, sequence = "stop_sequence", choice["stop_reason"]
        ending: Json = {"stop_reason": reason, "stop_sequence": sequence}
        if "speculative" in choice:
            ending["speculative"] = choice["speculative"]
        return ending

    def _usage(self) -> Json:
        usage = self._chat.usage
        return _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _event(name: str, **fields: object) -> Event:
    return Event({"type": name, **fields}, name)


def _usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> Json:
    """This API counts what the cache held apart from the input."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_read_input_tokens": num_cached_tokens,
        "cache_creation_input_tokens": 0,  # writing costs nothing here
        "output_tokens": num_output_tokens,
    }
