"""Response bodies of the OpenAI routes, whole and streamed, made from RequestOutputs."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from nano.engine.detokenizer import IncrementalDetokenizer
from nano.engine.tokenizer import Tokenizer
from nano.errors import RequestFailed
from nano.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    SpeculationTrace,
)
from nano.serve.errors import describe
from nano.serve.openai.schemas import ChatBody, CompletionBody, GenerationBody
from nano.serve.openai.speculation import report_json, trace_json
from nano.serve.openai.usage import Usage
from nano.serve.reply import Event, Json, Reply
from nano.speculation import SpeculationStats

LOWEST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's stand-in


class OpenAIReply(Reply):
    """What the answers of chat and completions share."""

    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(self, body: GenerationBody, tokenizer: Tokenizer, head: Json):
        """`head` is what every body of the answer has: id, created, model, system_fingerprint."""
        self.usage = Usage(has_prediction=body.prediction is not None)
        self._tokenizer = tokenizer
        self._n = 1 if body.n is None else body.n
        self._shows_token_ids = bool(body.return_token_ids)
        self._shows_speculation = body.shows_speculation
        self._shows_prompt_logprobs = body.prompt_logprobs is not None
        self._includes_usage = body.includes_usage
        self._opened: set[int] = set()  # choices that have had their first chunk
        self._head = head

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._take(output)
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
        for completion in output.outputs:
            index = prompt_index * self._n + completion.index
            if index not in self._opened:
                self._opened.add(index)
                opening = self._opening(index, output)
                if self._shows_token_ids:
                    opening = {**(opening or self._delta("")), "token_ids": []}
                    opening["prompt_token_ids"] = output.prompt_token_ids
                if opening is not None:
                    yield self._chunk(index, opening)
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
        for completion in output.outputs:
            if completion.finish_reason is FinishReason.ERROR:
                raise RequestFailed(completion.error or "the request failed")
        self.usage.count(output)

    def _chunk(self, index: int, fields: Json) -> Json:
        choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
        chunk = {**self._head, "object": self.chunk_name, "choices": [choice]}
        return {**chunk, "usage": None} if self._includes_usage else chunk

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


class ChatReply(OpenAIReply):
    """POST /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, body: ChatBody, tokenizer: Tokenizer, head: Json):
        super().__init__(body, tokenizer, head)
        self._num_top = body.top_logprobs or 0

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(completion.index, completion)}

    def _add_prompt(self, reply: Json, outputs: Sequence[RequestOutput]) -> None:
        if self._shows_token_ids:
            reply["prompt_token_ids"] = outputs[0].prompt_token_ids
        if self._shows_prompt_logprobs:
            reply["prompt_logprobs"] = prompt_logprobs(outputs[0])

    def _opening(self, index: int, output: RequestOutput) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def _end(self) -> Json:
        return {"delta": {}}

    def _logprobs(self, index: int, completion: CompletionOutput) -> Json | None:
        if completion.logprobs is None:
            return None
        return {"content": [self._position(p) for p in completion.logprobs], "refusal": None}

    def _position(self, position: PositionLogprobs) -> Json:
        token_id = next(iter(position))
        top = sorted(position.items(), key=lambda item: item[1].rank or 0)
        if self._num_top >= 0:
            top = top[: self._num_top]
        tops = [self._token(*item) for item in top]
        return {**self._token(token_id, position[token_id]), "top_logprobs": tops}

    def _token(self, token_id: int, logprob: Logprob) -> Json:
        return {
            "token": logprob.decoded_token,
            "logprob": finite(logprob.logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


class CompletionReply(OpenAIReply):
    """POST /v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer, head: Json):
        super().__init__(body, tokenizer, head)
        self._echoes = bool(body.echo)
        self._has_logprobs = body.logprobs is not None
        self._scores_only = body.scores_only
        self._hides_special = body.skip_special_tokens is not False
        self._cursors: dict[int, _TextCursor] = {}  # of the choices of a stream

    def _take(self, output: RequestOutput) -> None:
        if self._scores_only:
            for completion in output.outputs:
                completion.text, completion.token_ids, completion.stop_reason = "", [], None
                completion.logprobs = [] if self._has_logprobs else None
                if completion.speculative is not None:
                    completion.speculative.stats = SpeculationStats()
                if completion.speculative_trace is not None:
                    completion.speculative_trace = SpeculationTrace()
                if completion.finish_reason is FinishReason.STOP:
                    completion.finish_reason = FinishReason.LENGTH
        super()._take(output)

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        positions: list[PositionLogprobs | None] = [*(completion.logprobs or ())]
        if self._echoes and output.prompt_logprobs is not None:
            positions = output.prompt_logprobs + positions
        choice: Json = {
            "text": (self._prompt_text(output) if self._echoes else "") + completion.text,
            "logprobs": None,
        }
        if self._has_logprobs:
            choice["logprobs"] = self._positions(self._cursor(output), positions)
        if self._shows_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        if self._shows_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(output)
        return choice

    def _add_prompt(self, reply: Json, outputs: Sequence[RequestOutput]) -> None:
        """Each choice has its own prompt here."""

    def _opening(self, index: int, output: RequestOutput) -> Json | None:
        self._cursors[index] = self._cursor(output)
        if not self._echoes:
            return None
        opening = self._delta(self._prompt_text(output))
        if self._has_logprobs and output.prompt_logprobs is not None:
            opening["logprobs"] = self._positions(self._cursors[index], output.prompt_logprobs)
        return opening

    def _delta(self, text: str) -> Json:
        return {"text": text}

    def _end(self) -> Json:
        return {"text": ""}

    def _logprobs(self, index: int, completion: CompletionOutput) -> Json | None:
        if completion.logprobs is None:
            return None
        return self._positions(self._cursors[index], completion.logprobs)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _cursor(self, output: RequestOutput) -> "_TextCursor":
        return _TextCursor(self._tokenizer, output, self._echoes, self._hides_special)

    def _positions(
        self, cursor: "_TextCursor", positions: Sequence[PositionLogprobs | None]
    ) -> Json:
        """Four parallel lists. A position that is None is the first token of the prompt."""
        fields: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for position in positions:
            if position is None:
                token_id = cursor.first_prompt_token_id
                token = self._tokenizer.token_text(token_id)
                logprob, top = None, None
            else:
                token_id = next(iter(position))
                chosen = next(iter(position.values()))
                token, logprob = chosen.decoded_token or "", finite(chosen.logprob)
                top = {}
                for entry in sorted(position.values(), key=lambda entry: entry.logprob):
                    top[entry.decoded_token or ""] = finite(entry.logprob)
                # Tokens may look alike: the last one written, the most likely, stands for all.
                top = dict(reversed(top.items()))
            fields["text_offset"].append(cursor.take(token_id))
            fields["token_logprobs"].append(logprob)
            fields["tokens"].append(token)
            fields["top_logprobs"].append(top)
        return fields


class _TextCursor:
    """Where each token of a choice begins in the choice's text, which is not the sum of the tokens'
    own texts: a character may take several tokens, and special tokens may be hidden.
    """

    def __init__(
        self, tokenizer: Tokenizer, output: RequestOutput, echoes: bool, hides_special: bool
    ):
        self.first_prompt_token_id = output.prompt_token_ids[0]
        self._offset = 0
        self._prompt = output.prompt  # None: the caller sent ids, and sees all of them as text
        self._num_prompt_tokens = len(output.prompt_token_ids) if echoes else 0  # still to come
        self._tokenizer = tokenizer
        self._of_prompt = IncrementalDetokenizer(tokenizer, (), self._prompt is not None)
        self._of_output = IncrementalDetokenizer(tokenizer, output.prompt_token_ids, hides_special)

    def take(self, token_id: int) -> int:
        """The offset of the next token."""
        begin = self._offset
        if self._num_prompt_tokens == 0:
            self._offset += len(self._of_output.step(token_id))
            return begin
        self._num_prompt_tokens -= 1
        token = self._tokenizer.token_text(token_id)
        is_special = token_id in self._tokenizer.special_token_ids
        if self._prompt is not None and is_special and token in self._prompt:
            self._offset += len(token)  # the caller wrote it; BOS was added
        else:
            self._offset += len(self._of_prompt.step(token_id))
        return begin


def prompt_logprobs(output: RequestOutput) -> list[Json | None]:
    """vLLM's shape: per prompt token, token id -> its log probability."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in output.prompt_logprobs or ()
    ]


def finite(logprob: float) -> float:
    """`logprob` as JSON can hold it."""
    return max(logprob, LOWEST_LOGPROB)
