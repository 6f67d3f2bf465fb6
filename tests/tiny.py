"""Tiny random checkpoints: a folder with every file of a real one, made in a fraction of a second.

The weights are large enough that logits are not flat and greedy text varies. The tokenizer is
byte-level: token id b is the byte b, and the special tokens follow.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN_ID, EOS_TOKEN_ID, IM_START_TOKEN_ID, IM_END_TOKEN_ID = range(256, 260)
VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FAMILIES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
}


def make_checkpoint(
    folder: Path | str,
    family: str = "llama",
    *,
    seed: int = 0,
    max_shard_size: str = "5GB",
    **config_overrides: Any,
) -> Path:
    """Write a float32 checkpoint of `family` with its tokenizer; returns the folder.

    `config_overrides` are fields of the Hugging Face config (`rope_scaling=`,
    `tie_word_embeddings=`, `head_dim=`, `num_hidden_layers=` ...). Equal arguments give equal
    weights.
    """
    folder = Path(folder)
    defaults = _SIZES | ({"head_dim": 16} if family == "qwen3" else {})
    defaults |= {"sliding_window": None} if family == "mistral" else {}
    config = FAMILIES[family](**(defaults | config_overrides))
    model = random_model(config, seed)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def random_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """A model whose every parameter is random: biases and norms too, unlike HF's own init."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(0.2 * noise)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model


def write_tokenizer(folder: Path) -> None:
    """Byte-level tokenizer.json and tokenizer_config.json with a small chat template."""
    vocab = {char: byte for byte, char in enumerate(byte_to_char())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def byte_to_char() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself if printable, else from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in chars:
            chars[byte] = chr(0x100 + len(chars) - len(printable))
    return [chars[byte] for byte in range(256)]
