"""A tiny checkpoint whose tokens are pieces of words, and one that it cannot compute."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nano.checkpoint.gguf_tokenizer import write_tokenizer
from tests.tiny import make_checkpoint
from tests.vocabularies import sentencepiece_metadata

_METADATA = sentencepiece_metadata()
TOKENS: list[str] = _METADATA["tokenizer.ggml.tokens"]
WORDS_EOS_TOKEN_ID: int = _METADATA["tokenizer.ggml.eos_token_id"]
NAN_TOKEN_ID = TOKENS.index("<tool>")  # whoever reads it gets logits that are not numbers


def make_words(folder: Path) -> Path:
    special: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": WORDS_EOS_TOKEN_ID}
    make_checkpoint(folder, vocab_size=len(TOKENS), max_position_embeddings=1024, **special)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    write_tokenizer(_METADATA, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_TOKEN_ID] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def word_ids(*pieces: str) -> list[int]:
    """Token ids of pieces as the vocabulary writes them, with ▁ for a space."""
    return [TOKENS.index(piece) for piece in pieces]


def byte_ids(text: str) -> list[int]:
    """Token ids of the bytes of a text."""
    return [TOKENS.index(f"<0x{byte:02X}>") for byte in text.encode()]
