"""CompletionReply: the answer of POST /v1/completions."""

from collections.abc import Sequence

from nano.engine.tokenizer import Tokenizer
from nano.outputs import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    SpeculationTrace,
)
from nano.serve.openai.completion_body import CompletionBody
from nano.serve.openai.logprobs import finite, prompt_logprobs
from nano.serve.openai.openai_reply import OpenAIReply
from nano.serve.openai.text_cursor import TextCursor
from nano.serve.reply import Json
from nano.speculation import SpeculationStats


class CompletionReply(OpenAIReply):
    """POST /v1/completions."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    has_one_prompt = False

    def __init__(self, body: CompletionBody, tokenizer: Tokenizer, head: Json):
        super().__init__(body, tokenizer, head)
        self._echoes = bool(body.echo)
        self._has_logprobs = body.logprobs is not None
        self._scores_only = body.scores_only
        self._hides_special = body.skip_special_tokens is not False
        self._cursors: dict[int, TextCursor] = {}  # of the choices of a stream

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

    def _cursor(self, output: RequestOutput) -> TextCursor:
        return TextCursor(self._tokenizer, output, self._echoes, self._hides_special)

    def _positions(self, cursor: TextCursor, positions: Sequence[PositionLogprobs | None]) -> Json:
        """Four parallel lists. A position that is None is the first token of the prompt."""
        fields: Json = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for position in positions:
            if position is None:
                token_id = cursor.first_prompt_token_id
                text, logprob, top = self._tokenizer.token_text(token_id), None, None
            else:
                token_id, chosen = next(iter(position.items()))
                text, logprob, top = chosen.decoded_token or "", finite(chosen.logprob), {}
                for one, entry in sorted(position.items(), key=lambda item: item[1].logprob):
                    top[self._token_name(one, entry.decoded_token)] = finite(entry.logprob)
                # Tokens may look alike: the last one written, the most likely, stands for all.
                top = dict(reversed(top.items()))
            fields["text_offset"].append(cursor.take(token_id))
            fields["token_logprobs"].append(logprob)
            fields["tokens"].append(self._token_name(token_id, text))
            fields["top_logprobs"].append(top)
        return fields
