"""IncrementalDetokenizer: token ids to text, a token at a time. Torch-free.

Works on bytes, not on decoded strings: a token is bytes (`Tokenizer.token_bytes`), and a UTF-8
decoder with three bytes of memory turns them into characters as they complete. That is constant
work per token, can never rewrite text already given, and needs no window of earlier tokens. The
`DecodeStream` of `tokenizers` was measured against it and not taken: it decodes the tail again for
every token, keeps growing that tail while bytes stay invalid, raises once a byte-fallback
tokenizer changes its mind about earlier bytes, and has no flush.
"""

import codecs
from collections.abc import Sequence

from nano.engine.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
_LONGEST_INCOMPLETE = 3  # bytes of a UTF-8 character that lacks its last one


class IncrementalDetokenizer:
    """The text of one request's output, in the context of its prompt.

    The texts of `step` and `flush` joined are what decoding prompt and output at once adds to the
    prompt's text: a leading space is kept, and a character begun by the prompt's last token is
    completed. If it is not, its U+FFFD is in the prompt's text already, and does not come again. No
    text holds half a character; U+FFFD appears only where the whole decode has it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ):
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = _utf8_decoder("replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._hidden:
                tail = self._token_bytes(token_id) + tail
            if len(tail) >= _LONGEST_INCOMPLETE:
                break
        self._decoder.decode(tail)
        self._is_in_prompts_character = bool(self._pending)
        # Only text that starts at the very beginning loses the tokenizer's dummy space.
        self._strip_next = tokenizer.strips_first_space and not tail

    def step(self, token_id: int) -> str:
        """The characters that `token_id` completes; often none or several."""
        if token_id in self._hidden:
            return ""
        data = self._token_bytes(token_id)
        if self._strip_next and data:
            data = data.removeprefix(b" ")
            self._strip_next = False
        text = self._decoder.decode(data)
        return self._without_prompts(text) if self._is_in_prompts_character else text

    def settle(self, token_id: int) -> str:
        """U+FFFD if `token_id`, which is to be stepped next, breaks off a character; else nothing.

        `step` then gives the token's own characters only. Without it they come with the U+FFFD.
        """
        first = b"" if token_id in self._hidden else self._token_bytes(token_id)[:1]
        if not first or not self._pending:
            return ""
        try:
            _utf8_decoder().decode(self._pending + first)
        except UnicodeDecodeError:
            return self.flush()
        return ""

    def flush(self) -> str:
        """U+FFFD if the output ends inside a character, else nothing. Call once, at the end."""
        text = self._decoder.decode(b"", True)
        return self._without_prompts(text) if self._is_in_prompts_character else text

    @property
    def _pending(self) -> bytes:
        """The bytes of a character that has begun."""
        return self._decoder.getstate()[0]

    def _without_prompts(self, text: str) -> str:
        """`text` without the U+FFFD that the prompt's text ends with."""
        if text:
            self._is_in_prompts_character = False
        return text.removeprefix(_REPLACEMENT)
