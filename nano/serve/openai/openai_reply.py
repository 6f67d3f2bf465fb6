"""OpenAIReply: what the answers of chat and completions share, whole and streamed."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from nano.engine.tokenizer import Tokenizer
from nano.errors import RequestFailed
from nano.outputs import CompletionOutput, FinishReason, RequestOutput
from nano.serve.http.errors import describe
from nano.serve.openai.body import GenerationBody
from nano.serve.openai.speculation import report_json, trace_json
from nano.serve.openai.usage import Usage
from nano.serve.reply import Event, Json, Reply


class OpenAIReply(Reply):
    """What the answers of chat and completions share."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    has_one_prompt: ClassVar[bool]  # or each choice has its own

    def __init__(self, body: GenerationBody, tokenizer: Tokenizer, head: Json):
        """`head` is what every body of the answer has: id, created, model, system_fingerprint."""
        self.usage = Usage(has_prediction=body.prediction is not None)
        self._tokenizer = tokenizer
        self._n = 1 if body.n is None else body.n
        self._shows_token_ids = bool(body.return_token_ids)
        self._shows_speculation = body.shows_speculation
        self._shows_prompt_logprobs = body.prompt_logprobs is not None
        self._names_tokens_by_id = bool(body.return_tokens_as_token_ids)
        self._includes_usage = body.includes_usage
        self._includes_usage_always = body.includes_usage_always
        self._opened: set[int] = set()  # choices that have had their first chunk
        self._head = head

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._take(output)
            self.usage.count(output)
            for completion in output.outputs:
                choice = self._choice(output, completion)
                choice["index"] = prompt_index * self._n + completion.index
                choice["finish_reason"] = completion.finish_reason
                choice["stop_reason"] = completion.stop_reason
                choice["seed"] = completion.seed
                if self._shows_token_ids:
                    choice["token_ids"] = completion.token_ids
                if self._shows_speculation and completion.speculative is not None:
                    choice["speculative"] = report_json(completion.speculative)
                if completion.speculative_trace is not None:
                    choice["speculative_trace"] = trace_json(completion.speculative_trace)
                choices.append(choice)
        reply = {**self._head, "object": self.object_name, "choices": choices}
        self._add_prompt(reply, outputs)
        return {**reply, "usage": self.usage.to_json()}

    def news(self, prompt_index: int, output: RequestOutput) -> Iterator[Event]:
        for chunk in self._chunks(prompt_index, output):
            yield Event(chunk)

    def closing(self) -> Iterator[Event]:
        if self._includes_usage:
            head = {**self._head, "object": self.chunk_name}
            yield Event({**head, "choices": [], "usage": self.usage.to_json()})
        yield Event("[DONE]")

    def failure(self, error: Exception) -> Iterator[Event]:
        yield Event(describe(error)[1])

    def _chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[Json]:
        self._take(output)
        self.usage.count_prompt(output)
        for completion in output.outputs:
            index = prompt_index * self._n + completion.index
            if index not in self._opened:
                self._opened.add(index)
                opening, prompt = self._opening(index, output), {}
                if self._shows_token_ids:
                    opening = {**(opening or self._delta("")), "token_ids": []}
                    prompt = {"prompt_token_ids": output.prompt_token_ids}
                if opening is not None:
                    yield self._chunk(index, opening, prompt)
            self.usage.count_completion(completion)
            shows_more = (
                self._shows_token_ids or completion.logprobs or completion.speculative_trace
            )
            if completion.text or (completion.token_ids and shows_more):
                delta = self._delta(completion.text)
                delta["logprobs"] = self._logprobs(index, completion)
                if self._shows_token_ids:
                    delta["token_ids"] = completion.token_ids
                if completion.speculative_trace is not None:
                    delta["speculative_trace"] = trace_json(completion.speculative_trace)
                yield self._chunk(index, delta)
            if completion.finish_reason is not None:
                end = {**self._end(), "stop_reason": completion.stop_reason}
                end["seed"] = completion.seed
                if self._shows_speculation and completion.speculative is not None:
                    end["speculative"] = report_json(completion.speculative)
                yield self._chunk(index, {**end, "finish_reason": completion.finish_reason})

    def _take(self, output: RequestOutput) -> None:
        """Look at an output before it is answered with."""
        for completion in output.outputs:
            if completion.finish_reason is FinishReason.ERROR:
                raise RequestFailed(completion.error or "the request failed")

    def _chunk(self, index: int, fields: Json, prompt: Json | None = None) -> Json:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        chunk = {**self._head, "object": self.chunk_name, "choices": [choice]}
        if prompt:
            (chunk if self.has_one_prompt else choice).update(prompt)
        if self._includes_usage:
            chunk["usage"] = self.usage.to_json() if self._includes_usage_always else None
        return chunk

    def _token_name(self, token_id: int, text: str | None) -> str:
        """How log probabilities call a token; texts of several may look alike."""
        return f"token_id:{token_id}" if self._names_tokens_by_id else text or ""

    @abstractmethod
    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        """What is particular to the route in a whole completion."""

    @abstractmethod
    def _add_prompt(self, reply: Json, outputs: Sequence[RequestOutput]) -> None:
        """Add what was asked about the prompts, where the route has it."""

    @abstractmethod
    def _opening(self, index: int, output: RequestOutput) -> Json | None:
        """What a choice's stream begins with."""

    @abstractmethod
    def _delta(self, text: str) -> Json:
        """New text of a choice."""

    @abstractmethod
    def _end(self) -> Json:
        """The delta that goes with a finish_reason."""

    @abstractmethod
    def _logprobs(self, index: int, completion: CompletionOutput) -> Json | None:
        """Log probabilities of new tokens of choice `index`."""
