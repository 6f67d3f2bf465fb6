"""TextCursor: where each token of a choice begins in its text (`text_offset`)."""

from nano.engine.detokenizer import IncrementalDetokenizer
from nano.engine.tokenizer import Tokenizer
from nano.outputs import RequestOutput


class TextCursor:
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
        if self._num_prompt_tokens == 0:
            return self._step(self._of_output, token_id)
        self._num_prompt_tokens -= 1
        token = self._tokenizer.token_text(token_id)
        is_special = token_id in self._tokenizer.special_token_ids
        begin = self._offset
        if self._prompt is not None and is_special and self._prompt.startswith(token, begin):
            self._offset += len(token)  # the caller wrote it; BOS was added
        else:
            begin = self._step(self._of_prompt, token_id)
        if self._num_prompt_tokens == 0:
            self._offset += len(self._of_prompt.flush())
        return begin

    def _step(self, detokenizer: IncrementalDetokenizer, token_id: int) -> int:
        self._offset += len(detokenizer.settle(token_id))  # of tokens before it
        begin = self._offset
        self._offset += len(detokenizer.step(token_id))
        return begin
