"""A GGUF file's tokenizer, written as the tokenizer.json it was once converted from. Torch-free.

GGUF keeps a vocabulary, its merges or scores, and the *name* of a pre-tokenizer whose rules live
in the reader. Here that name is turned back into rules; one we do not know exactly is refused,
since a nearly right split gives nearly right ids and silently worse text.
"""

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from nano.errors import CheckpointError
from nano.log import get_logger

logger = get_logger(__name__)

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# What the converter, or llama.cpp, takes a word boundary to be. `\p{N}` alone splits digits singly.
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_CODER_SPLITS = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)


class _TokenType(IntEnum):
    """tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5  # fills the embedding matrix up to a round size
    BYTE = 6


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder` from GGUF metadata.

    `metadata` maps GGUF keys to plain Python values. Raises `CheckpointError` naming the key for
    a missing or inconsistent entry, an unknown tokenizer model or an unknown pre-tokenizer.
    """
    source = _GgufVocabulary(metadata)
    if source.model == "gpt2":
        tokenizer = _byte_level(source)
    elif source.model == "llama":
        tokenizer = _sentencepiece(source)
    else:
        raise CheckpointError(
            f"tokenizer.ggml.model {source.model!r} is not supported; supported: gpt2, llama"
        )
    _write_json(folder / TOKENIZER_FILE, tokenizer)
    _write_json(folder / TOKENIZER_CONFIG_FILE, _settings(source))


class _GgufVocabulary:
    """The tokenizer keys of one file, checked. Ids are positions in `tokens`."""

    def __init__(self, metadata: Mapping[str, Any]):
        self.metadata = metadata
        self.model = str(self._required("model"))
        self.tokens = [str(token) for token in self._required("tokens")]
        self.types = list(self.get("token_type") or [_TokenType.NORMAL] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise CheckpointError(
                f"tokenizer.ggml.token_type has {len(self.types)} entries for "
                f"{len(self.tokens)} tokens"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def _required(self, key: str) -> Any:
        value = self.get(key)
        if value is None or (key == "tokens" and not value):
            raise CheckpointError(f"the GGUF file has no tokenizer.ggml.{key}")
        return value

    def required_list(self, key: str) -> list[Any]:
        return list(self._required(key))

    def token_of(self, key: str, default_id: int | None = None) -> str | None:
        """The text of the token whose id is at `key`."""
        token_id: int | None = self.get(key, default_id)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{key} is {token_id}, outside the {len(self.tokens)} tokens"
            )
        return self.tokens[token_id]

    @property
    def vocab(self) -> dict[str, int]:
        """Token -> id. The padding of the embedding matrix is no token: it would decode to text."""
        return {
            token: token_id
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types))
            if kind != _TokenType.UNUSED
        }

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens matched whole in the text; control tokens are the ones decoding may skip."""
        special = (_TokenType.CONTROL, _TokenType.UNKNOWN)
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind in special,
            }
            for token_id, (token, kind) in enumerate(zip(self.tokens, self.types))
            if kind in special or kind == _TokenType.USER_DEFINED
        ]


def _byte_level(source: _GgufVocabulary) -> dict[str, Any]:
    """GPT-2's kind: bytes as printable characters, merges in order."""
    pre = source.get("pre")
    if pre in (None, "default"):
        logger.warning("the GGUF file names no pre-tokenizer; GPT-2's word split is assumed")
        pre = "gpt-2"
    if pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported: "
            + ", ".join(sorted(_PRE_TOKENIZERS))
        )
    merges = [str(merge).split(" ") for merge in source.required_list("merges")]
    for merge in merges:
        if len(merge) != 2:
            raise CheckpointError(f"tokenizer.ggml.merges holds {merge!r}, which is not a pair")
    starts_with_bos = bool(source.get("add_bos_token", pre in _BOS_BY_DEFAULT))
    return _tokenizer_json(
        source,
        normalizer={"type": "NFC"} if pre in _NFC else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        # These vocabularies hold whole words that their own merges do not reach.
        model={"merges": merges, "ignore_merges": pre in _BOS_BY_DEFAULT},
        decoder=_BYTES_ONLY,
        starts_with_bos=starts_with_bos,
    )


def _sentencepiece(source: _GgufVocabulary) -> dict[str, Any]:
    """Llama 2's kind: U+2581 for space, a dummy space in front, bytes as <0xXX> tokens."""
    scores = source.required_list("scores")
    if len(scores) != len(source.tokens):
        raise CheckpointError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(source.tokens)} tokens"
        )
    has_prefix = bool(source.get("add_space_prefix", True))
    to_meta = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    from_meta = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [from_meta, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    # Normalisation runs on each stretch between added tokens, so each gets its dummy space.
    prepend = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
    return _tokenizer_json(
        source,
        normalizer={"type": "Sequence", "normalizers": [*prepend, to_meta]},
        pre_tokenizer=None,
        model={
            "merges": _merges_from_scores(source, scores),
            "unk_token": source.token_of("unknown_token_id", default_id=0),
            "fuse_unk": True,
            "byte_fallback": True,
        },
        decoder={"type": "Sequence", "decoders": decoders},
        starts_with_bos=bool(source.get("add_bos_token", True)),
    )


def _merges_from_scores(source: _GgufVocabulary, scores: Sequence[float]) -> list[list[str]]:
    """Every way to make a token of two others, best score first.

    SentencePiece joins the adjacent pair whose union scores best; merges tried in the order of
    that score do the same.
    """
    ids = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(source.tokens, source.types))
        if kind == _TokenType.NORMAL
    }
    ranked: list[tuple[float, int, int, list[str]]] = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], ids[left], ids[right], [left, right]))
    ranked.sort(key=lambda entry: entry[:3])
    return [pair for *_, pair in ranked]


def _tokenizer_json(
    source: _GgufVocabulary,
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    model: dict[str, Any],
    decoder: dict[str, Any],
    starts_with_bos: bool,
) -> dict[str, Any]:
    unsplittable = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": source.added_tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _post_processor(source, starts_with_bos),
        "decoder": decoder,
        "model": {"type": "BPE", **unsplittable, "vocab": source.vocab, **model},
    }


def _post_processor(source: _GgufVocabulary, starts_with_bos: bool) -> dict[str, Any] | None:
    """Adds BOS and EOS around a text encoded with special tokens, where the file asks for them."""
    first = _bos_token(source) if starts_with_bos else None
    last = _eos_token(source) if source.get("add_eos_token", False) else None
    if first is None and last is None:
        return None

    def around(*sequences: str) -> list[dict[str, Any]]:
        template: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            if first is not None:
                template.append({"SpecialToken": {"id": first, "type_id": type_id}})
            template.append({"Sequence": {"id": sequence, "type_id": type_id}})
            if last is not None:
                template.append({"SpecialToken": {"id": last, "type_id": type_id}})
        return template

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": {
            token: {"id": token, "ids": [source.tokens.index(token)], "tokens": [token]}
            for token in (first, last)
            if token is not None
        },
    }


def _settings(source: _GgufVocabulary) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by role, and the chat templates."""
    is_sentencepiece = source.model == "llama"
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": _bos_token(source),
        "eos_token": _eos_token(source),
        "unk_token": source.token_of("unknown_token_id", 0 if is_sentencepiece else None),
        "pad_token": source.token_of("padding_token_id"),
        "add_bos_token": source.get("add_bos_token", is_sentencepiece),
        "add_eos_token": source.get("add_eos_token", False),
    }
    key = "tokenizer.chat_template"
    names = source.metadata.get("tokenizer.chat_templates") or []
    named = {name: source.metadata.get(f"{key}.{name}") for name in names}
    named = {"default": source.metadata.get(key), **named}
    templates = [{"name": name, "template": text} for name, text in named.items() if text]
    if len(templates) == 1:
        settings["chat_template"] = templates[0]["template"]
    elif templates:
        settings["chat_template"] = templates
    return {name: value for name, value in settings.items() if value is not None}


def _bos_token(source: _GgufVocabulary) -> str | None:
    return source.token_of("bos_token_id", 1 if source.model == "llama" else None)


def _eos_token(source: _GgufVocabulary) -> str | None:
    return source.token_of("eos_token_id", 2 if source.model == "llama" else None)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    """`use_regex` splits words as GPT-2 does before bytes become characters."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


_BYTES_ONLY = _bytes(use_regex=False)
_SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2 = [_bytes(use_regex=True)]
_STARCODER = [_SINGLE_DIGITS, _bytes(use_regex=True)]
_QWEN2 = [_split(_QWEN2_SPLIT), _BYTES_ONLY]
_LLAMA3 = [_split(_LLAMA3_SPLIT), _BYTES_ONLY]

_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": [_split(_TEKKEN_SPLIT), _BYTES_ONLY],
    "deepseek-coder": [
        *(_split(pattern) for pattern in _DEEPSEEK_CODER_SPLITS),
        _SINGLE_DIGITS,
        _BYTES_ONLY,
    ],
}
_NFC = frozenset({"qwen2"})
# Llama 3's family: BOS unless the file says otherwise, and words of the vocabulary taken whole.
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
