"""ResponsesReply: the answer of the Responses API, made from the answer of a chat."""

from collections.abc import Iterator, Sequence

from nano.outputs import RequestOutput
from nano.sampling_params import SamplingParams
from nano.serve.http.errors import describe
from nano.serve.openai.chat_reply import ChatReply
from nano.serve.reply import Event, Json, Reply
from nano.serve.responses.body import ResponsesBody


class ResponsesReply(Reply):
    """A response: one message with one part, which holds the text of the chat's only choice."""

    def __init__(
        self, body: ResponsesBody, chat: ChatReply, head: Json, sampling_params: SamplingParams
    ):
        """`head` is what every body of the answer has: id, created, model, system_fingerprint."""
        self._chat = chat
        self._head = {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "model": head["model"],
            "system_fingerprint": head["system_fingerprint"],
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": sampling_params.temperature,
            "top_p": sampling_params.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "seed": sampling_params.seed,
            "text": {"format": {"type": "text"}},
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "background": False,
            "truncation": "disabled",
            "service_tier": "default",
            "user": body.user,
            "metadata": body.metadata or {},
        }
        self._item_id = "msg_" + head["id"].removeprefix("resp_")
        self._texts: list[str] = []
        self._logprobs: list[Json] = []
        self._end: Json = {}  # the choice that has a finish_reason
        self._num_events = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        (choice,) = self._chat.whole(outputs)["choices"]
        self._take(choice["message"], choice)
        return self._response(self._status)

    def opening(self) -> Iterator[Event]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        item = {**self._item("in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._part_event("response.content_part.added", part=self._part())

    def news(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        for event in self._chat.news(prompt_index, output):
            assert not isinstance(event.data, str)
            (choice,) = event.data["choices"]
            text, logprobs = self._take(choice["delta"], choice)
            if text or logprobs:
                yield self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def closing(self) -> Iterator[Event]:
        part = self._part()
        text, logprobs = part["text"], part["logprobs"]
        yield self._part_event("response.output_text.done", text=text, logprobs=logprobs)
        yield self._part_event("response.content_part.done", part=part)
        item = self._item(self._status)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def failure(self, error: Exception) -> Iterator[Event]:
        status, body = describe(error)
        code = "rate_limit_exceeded" if status == 429 else "server_error"
        response = self._response("failed")
        response["error"] = {"code": code, "message": body["error"]["message"]}
        yield self._event("response.failed", response=response)

    @property
    def _status(self) -> str:
        return "incomplete" if self._end["finish_reason"] == "length" else "completed"

    def _take(self, message: Json, choice: Json) -> tuple[str, list[Json]]:
        """Keep what a choice brings; the new text and log probabilities."""
        text = message.get("content") or ""
        logprobs = choice["logprobs"]["content"] if choice["logprobs"] else []
        self._texts.append(text)
        self._logprobs += logprobs
        if choice["finish_reason"] is not None:
            self._end = choice
        return text, logprobs

    def _event(self, name: str, **fields: object) -> Event:
        self._num_events += 1
        return Event({"type": name, "sequence_number": self._num_events - 1, **fields}, name)

    def _part_event(self, name: str, **fields: object) -> Event:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(name, **place, **fields)

    def _response(self, status: str) -> Json:
        response: Json = {**self._head, "status": status, "error": None}
        response["incomplete_details"] = None
        response["output"], response["usage"] = [], None
        if status == "in_progress":
            return response
        response["output"] = [self._item("incomplete" if status == "failed" else status)]
        response["usage"] = self._usage()
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if "speculative" in self._end:
            response["speculative"] = self._end["speculative"]
        return response

    def _item(self, status: str) -> Json:
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return {**item, "content": [self._part()]}

    def _part(self) -> Json:
        part = {"type": "output_text", "text": "".join(self._texts), "annotations": []}
        return {**part, "logprobs": self._logprobs}

    def _usage(self) -> Json:
        usage = self._chat.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,  # writing costs nothing here
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
