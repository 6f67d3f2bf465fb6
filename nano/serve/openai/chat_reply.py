"""ChatReply: the answer of POST /v1/chat/completions."""

from collections.abc import Sequence

from nano.engine.tokenizer import Tokenizer
from nano.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from nano.serve.openai.chat_body import ChatBody
from nano.serve.openai.logprobs import finite, prompt_logprobs
from nano.serve.openai.openai_reply import OpenAIReply
from nano.serve.reply import Json


class ChatReply(OpenAIReply):
    """POST /v1/chat/completions."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    has_one_prompt = True

    def __init__(self, body: ChatBody, tokenizer: Tokenizer, head: Json):
        super().__init__(body, tokenizer, head)
        self._num_top = body.top_logprobs or 0
        self._echoed_text = body.echoed_text

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> Json:
        text = self._echoed_text + completion.text
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(completion.index, completion)}

    def _add_prompt(self, reply: Json, outputs: Sequence[RequestOutput]) -> None:
        if self._shows_token_ids:
            reply["prompt_token_ids"] = outputs[0].prompt_token_ids
        if self._shows_prompt_logprobs:
            reply["prompt_logprobs"] = prompt_logprobs(outputs[0])

    def _opening(self, index: int, output: RequestOutput) -> Json:
        return {"delta": {"role": "assistant", "content": self._echoed_text}}

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
            "token": self._token_name(token_id, logprob.decoded_token),
            "logprob": finite(logprob.logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
