"""Tokenizer: text to token ids and back, and chat templates. Torch-free.

Owns one `tokenizers` backend and the rule that makes decoding simple: in every tokenizer nano
takes, a token stands for fixed bytes and text is the UTF-8 of those bytes. So decoding is a join,
and can be done a token at a time (`detokenizer.py`) with the same result.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tokenizers

from nano.engine.chat_template import ChatTemplates, check_template
from nano.errors import CheckpointError
from nano.sampling_params import check_text

_METASPACE = "▁"
_Value = TypeVar("_Value")
_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """A model's tokenizer. Immutable after loading, and safe to share between threads.

    Decoding equals the Hugging Face fast tokenizer's `decode` without clean-up of spaces, except
    where a byte-fallback tokenizer is given invalid UTF-8: there each invalid stretch becomes one
    U+FFFD and valid characters beside it survive. Fast tokenizers put no spaces between special
    tokens, so `spaces_between_special_tokens` has nothing to switch. Ids without a token (a padded
    vocabulary) decode to nothing.
    """

    def __init__(
        self,
        backend: Any,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ):
        """`backend` is a `tokenizers.Tokenizer`; `special_tokens` maps roles to token texts."""
        backend.no_truncation()  # left over from training in many files
        backend.no_padding()
        self._backend = backend
        self._chat_templates = ChatTemplates(chat_templates or {}, special_tokens or {})
        self.template_names = tuple(chat_templates or ())
        tokens = special_tokens or {}
        self.bos_token_id: int | None = self._id_of(tokens.get("bos_token"))
        self.eos_token_id: int | None = self._id_of(tokens.get("eos_token"))
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        to_bytes, self.strips_first_space = _byte_rule(backend.decoder)
        # Filled as tokens are met: 150 thousand entries would cost a start-up most of a second.
        self._bytes = _Memo(lambda token_id: to_bytes(backend.id_to_token(token_id) or ""))
        self._texts = _Memo(lambda token_id: self._bytes[token_id].decode("utf-8", "replace"))

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str | None = None) -> "Tokenizer":
        """Load a checkpoint's tokenizer; `chat_template` (Jinja) replaces all that it brings.

        Raises `CheckpointError`, and `ConfigError` if `chat_template` is no template.
        """
        if chat_template is not None:
            check_template(chat_template)
        settings = _read_json(folder / "tokenizer_config.json")
        special_map = _read_json(folder / "special_tokens_map.json")
        special_tokens = {
            role: _token_text(settings.get(role) or special_map.get(role)) for role in _TOKEN_ROLES
        }
        return cls(
            _load_backend(folder),
            {role: text for role, text in special_tokens.items() if text is not None},
            _read_chat_templates(folder, settings)
            if chat_template is None
            else {"default": chat_template},
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        `add_special_tokens` adds what the model expects around a plain text, usually BOS. A chat
        template writes BOS itself, so encode its text without.
        """
        ids: list[int] = self._encoding(text, add_special_tokens).ids
        return ids

    def encode_truncated(
        self, text: str, limit: int, side: Literal["left", "right"], add_special_tokens: bool = True
    ) -> tuple[list[int], bool]:
        """At most `limit` token ids of `text`, and whether any were dropped from its `side`.

        What `add_special_tokens` adds around a text counts, and stays around what is left of it.
        """
        encoding = self._encoding(text, add_special_tokens=False)
        num_added = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        room = max(0, limit - num_added)
        is_cut = len(encoding.ids) > room
        if is_cut:
            encoding.truncate(room, direction=side)
        ids = self._backend.post_process(encoding, add_special_tokens=add_special_tokens).ids
        return ids[:limit], is_cut

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        check_text("prompt", text)
        # Unlike `encode`, a batch lets other threads run: megabytes of text take seconds.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def encode_fragment(self, text: str) -> list[int]:
        """Token ids of `text` as it stands inside a longer text: no dummy space in front of it."""
        if not self.strips_first_space:
            return self.encode(text, add_special_tokens=False)
        anchor = self.encode("\n", add_special_tokens=False)  # joins with no word
        ids = self.encode("\n" + text, add_special_tokens=False)
        return ids[len(anchor) :]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; invalid or incomplete UTF-8 becomes U+FFFD."""
        data = b"".join(self.visible_bytes(token_ids, skip_special_tokens))
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def visible_bytes(self, token_ids: Iterable[int], skip_special_tokens: bool) -> list[bytes]:
        """The bytes of each token that shows in the text."""
        if skip_special_tokens:
            token_ids = (i for i in token_ids if i not in self.special_token_ids)
        return [self._bytes[token_id] for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes `token_id` stands for; half a character is a token like any other."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text with its leading space; bytes that are no UTF-8 become U+FFFD."""
        return self._texts[token_id]

    def vocabulary_entry(self, token_id: int) -> str:
        """How the vocabulary itself writes `token_id`; "" for an id without a token."""
        return self._backend.id_to_token(token_id) or ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template: str | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Render a conversation; encode the result with `add_special_tokens=False`.

        `template` is Jinja text or the name of one of the model's templates. With
        `continue_final_message` the text ends where the last message's content does. `kwargs`
        (`tools`, `documents`, `enable_thinking`, ...) are variables of the template, which must
        read them. Raises `InvalidRequest`, with the template's own words if it refuses the
        conversation.
        """
        return self._chat_templates.render(
            messages, add_generation_prompt, template, kwargs, continue_final_message
        )

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)


class _Memo(dict[int, _Value]):
    """token id -> value, computed on first use."""

    def __init__(self, compute: Callable[[int], _Value]):
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> _Value:
        value = self[token_id] = self._compute(token_id)
        return value


def _byte_rule(decoder: Any) -> tuple[Callable[[str], bytes], bool]:
    """From a tokenizer.json's decoder: a token's bytes, and whether a first space is dropped."""
    state: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "nothing"}
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return _byte_level_bytes, False
    if kinds == {"Metaspace"}:
        return _metaspace_bytes, parts[0].get("prepend_scheme", "always") != "never"
    replaces = [part for part in parts if part["type"] == "Replace"]
    if (
        kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        and [(part["pattern"], part["content"]) for part in replaces] == [_METASPACE_TO_SPACE]
        and all(_is_first_space(part) for part in parts if part["type"] == "Strip")
    ):
        to_bytes = _byte_fallback_bytes if "ByteFallback" in kinds else _metaspace_bytes
        return to_bytes, "Strip" in kinds
    raise CheckpointError(
        f"tokenizer.json has a decoder of {' + '.join(sorted(kinds))}, which is not supported; "
        "supported: ByteLevel, Metaspace, and Replace + ByteFallback + Fuse + Strip"
    )


_METASPACE_TO_SPACE = ({"String": _METASPACE}, " ")


def _is_first_space(strip: Mapping[str, Any]) -> bool:
    return (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)


def _char_to_byte() -> dict[str, int]:
    """GPT-2's stand-ins: a printable byte is its Latin-1 character, others count from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_CHAR_TO_BYTE = _char_to_byte()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_CHAR_TO_BYTE[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


def _metaspace_bytes(token: str) -> bytes:
    return token.replace(_METASPACE, " ").encode()


def _byte_fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:  # <0xZZ>: plain text after all
            return token.encode()
    return _metaspace_bytes(token)


def _load_backend(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            return tokenizers.Tokenizer.from_file(str(path))
        # Costs seconds and imports torch, so only for folders that leave no other way.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)._tokenizer
    except AttributeError as error:
        raise CheckpointError(f"{folder} has a tokenizer without a fast version") from error
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"cannot load the tokenizer of {folder}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold an object, got {type(value).__name__}")
    return value


def _token_text(token: Any) -> str | None:
    """A special token's text: written plainly, or as the fields of an AddedToken."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _read_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> Jinja text. Files win over tokenizer_config.json, as in transformers."""
    stored = settings.get("chat_template")
    if isinstance(stored, str):
        stored = {"default": stored}
    elif isinstance(stored, list):
        stored = {entry["name"]: entry["template"] for entry in stored}
    templates = dict(stored or {})
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates
