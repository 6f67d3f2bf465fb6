import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nano.checkpoint.gguf_tokenizer import write_tokenizer
from nano.engine.tokenizer import Tokenizer
from nano.errors import CheckpointError
from tests.vocabularies import (
    LETTERS,
    PIECES,
    read_smollm2_metadata,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
    smollm2_tokenizer,
    tokenizer_from,
)

MERGES = ["Ġ a", "1 2", "12 3", "123 4", "a b", "e Ì", "eÌ ģ"]


def byte_level_metadata(pre: str | None, **changes: Any) -> dict[str, Any]:
    tokens = [
        *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        *(merge.replace(" ", "") for merge in MERGES),
    ]
    tokens += ["<bos>", "<eos>", "<tool>", "[PAD0]", "Ġwhole"]
    num_plain = len(tokens) - 5
    keys = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [*[1] * num_plain, 3, 3, 4, 5, 1],
        "merges": MERGES,
        "bos_token_id": num_plain,
        "eos_token_id": num_plain + 1,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def pieces(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens)
    return [tokenizer.token_text(token_id) for token_id in ids]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", " a", "1234"]),
        ("smollm", ["1", "2", "3", "4", " a", "1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4", " a", "1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4", " a", "123", "4"]),
        ("tekken", ["1", "2", "3", "4", " a", "1", "2", "3", "4"]),
        ("deepseek-coder", ["1", "2", "3", "4", " a", "1", "2", "3", "4"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_in_its_own_way(pre: str, expected: list[str]) -> None:
    assert pieces(tokenizer_from(byte_level_metadata(pre)), "1234 a1234") == expected


def test_only_qwen2_composes_characters_first() -> None:
    decomposed = "e\u0301"
    qwen = tokenizer_from(byte_level_metadata("qwen2"))
    assert qwen.decode(qwen.encode(decomposed)) == "é"
    assert pieces(tokenizer_from(byte_level_metadata("gpt-2")), decomposed) != ["é"]


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"'frobnicate' is not supported; .*qwen2"):
        tokenizer_from(byte_level_metadata("frobnicate"))


def test_an_unknown_tokenizer_model_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="'bert' is not supported"):
        tokenizer_from({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]})


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"no tokenizer.ggml.{key}"):
        tokenizer_from(byte_level_metadata("gpt-2", **{key: None}))


def test_special_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(CheckpointError, match="eos_token_id is 99999, outside"):
        tokenizer_from(byte_level_metadata("gpt-2", eos_token_id=99_999))


def test_a_vocabulary_without_a_pre_tokenizer_is_split_as_gpt2_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING", logger="nano"):
        assert pieces(tokenizer_from(byte_level_metadata(None)), "1234") == ["1234"]
    assert "names no pre-tokenizer" in caplog.text


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = tokenizer_from(byte_level_metadata("gpt-2"))
    ids = tokenizer.encode("a<eos><tool>b")
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<eos><tool>b"
    assert len(ids) == 4


def test_llama3_takes_a_word_of_the_vocabulary_whole_though_no_merge_reaches_it() -> None:
    assert pieces(tokenizer_from(byte_level_metadata("llama-bpe")), " whole") == [" whole"]
    assert pieces(tokenizer_from(byte_level_metadata("gpt-2")), " whole") == list(" whole")


def test_embedding_padding_decodes_to_nothing_and_is_never_encoded() -> None:
    metadata = byte_level_metadata("gpt-2")
    tokenizer = tokenizer_from(metadata)
    padding = metadata["tokenizer.ggml.tokens"].index("[PAD0]")
    assert tokenizer.decode([padding], skip_special_tokens=False) == ""
    assert padding not in tokenizer.encode("[PAD0]")


@pytest.mark.parametrize(
    ("pre", "add_bos", "add_eos", "expected"),
    [
        ("gpt-2", None, None, ["b"]),
        ("gpt-2", True, None, ["<bos>", "b"]),
        ("gpt-2", True, True, ["<bos>", "b", "<eos>"]),
        ("llama-bpe", None, None, ["<bos>", "b"]),
        ("llama-bpe", False, None, ["b"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    pre: str, add_bos: bool | None, add_eos: bool | None, expected: list[str]
) -> None:
    metadata = byte_level_metadata(pre, add_bos_token=add_bos, add_eos_token=add_eos)
    assert pieces(tokenizer_from(metadata), "b", add_special_tokens=True) == expected


def test_tokenizer_config_names_the_special_tokens_and_chat_templates(tmp_path: Path) -> None:
    metadata = byte_level_metadata("gpt-2", add_bos_token=True)
    metadata |= {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "with tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    write_tokenizer(metadata, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["bos_token"] == "<bos>"
    assert settings["eos_token"] == "<eos>"
    assert settings["add_bos_token"] is True
    assert "unk_token" not in settings
    assert settings["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
    ]


def sentencepiece_by_scores(text: str) -> list[str]:
    """SentencePiece's rule, spelled out: join the best-scored adjacent pair until none is left."""
    rank = {piece: index for index, piece in enumerate([*PIECES, *LETTERS])}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [
            (rank[left + right], index)
            for index, (left, right) in enumerate(pairwise(symbols))
            if left + right in rank
        ]
        if not joins:
            break
        _, index = min(joins)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    split = [
        [symbol] if symbol in rank else [f"<0x{byte:02X}>" for byte in symbol.encode()]
        for symbol in symbols
    ]
    return [token for tokens in split for token in tokens]


@given(st.text(alphabet="abthenig Pris.0\n€😀", max_size=24))
def test_merges_from_scores_do_what_sentencepiece_does(text: str) -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    ids = sentencepiece_tokenizer().encode(text, add_special_tokens=False)
    assert [tokens[token_id] for token_id in ids] == sentencepiece_by_scores(text)


def test_sentencepiece_adds_bos_and_the_dummy_space_unless_told_otherwise() -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]

    def encoded(**changes: Any) -> list[str]:
        tokenizer = tokenizer_from(sentencepiece_metadata(**changes))
        return [tokens[token_id] for token_id in tokenizer.encode("the")]

    assert encoded() == ["<s>", "▁the"]
    assert encoded(add_bos_token=False) == ["▁the"]
    assert encoded(add_bos_token=False, add_space_prefix=False) == ["t", "he"]


def test_sentencepiece_text_survives_a_round_trip() -> None:
    tokenizer = sentencepiece_tokenizer()
    text = "the  Paris, 12 €\n😀<tool>in"
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<tool>in", "<tool> in")


def test_without_byte_tokens_an_unknown_stretch_is_one_unknown_token() -> None:
    metadata = sentencepiece_metadata()
    words = metadata["tokenizer.ggml.tokens"][259:]
    tokenizer = tokenizer_from(
        sentencepiece_metadata(
            tokens=["<unk>", "<s>", "</s>", *words],
            token_type=[2, 3, 3, *metadata["tokenizer.ggml.token_type"][259:]],
            scores=[0.0] * 3 + metadata["tokenizer.ggml.scores"][259:],
        )
    )
    assert pieces(tokenizer, "the00€ is") == [" the", "<unk>", " is"]


def test_scores_must_match_the_tokens() -> None:
    with pytest.raises(CheckpointError, match="scores has 1 entries for"):
        tokenizer_from(sentencepiece_metadata(scores=[0.0]))


DIVERSE = [
    "Hello world",
    "  leading and trailing  ",
    "def f(x):\n    return x**2\n\n\n\tif a:\n\t\tpass",
    "🫠😀👩‍👩‍👧 emoji",
    "日本語の文章。中文字符，标点",
    "café naïve e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "I'm you'LL we'Ve",
    "\r\n\r\n a \r b   \n  \n   x",
    "a\u00a0b\u2003c",
    "ไทย नमस्ते $%^&*()!!! ???",
]


@cache
def published_smollm2() -> Any:
    """The published tokenizer's stages, put together by hand from the library's own parts."""
    metadata = read_smollm2_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.add_special_tokens(tokens[:17])
    return tokenizer


@pytest.mark.parametrize("text", DIVERSE)
def test_smollm2_ids_are_the_published_ones_and_stand_for_the_text(text: str) -> None:
    ids = smollm2_tokenizer().encode(text)
    assert smollm2_tokenizer().decode(ids, skip_special_tokens=False) == text
    assert ids == published_smollm2().encode(text).ids


def test_smollm2_knows_some_ids_by_heart() -> None:
    tokenizer = smollm2_tokenizer()
    assert tokenizer.encode("<|im_start|>") == [1]
    assert pieces(tokenizer, "in 1984, ½") == ["in", " ", "1", "9", "8", "4", ",", " ", "½"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
