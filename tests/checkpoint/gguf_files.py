"""Tiny GGUF files from tiny checkpoints, written the way llama.cpp's converter lays them out."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from tests.checkpoint.k_quants import quantize_q4_k, quantize_q6_k
from tests.tiny import SPECIAL_TOKENS, byte_to_char, make_checkpoint

VOCAB_SIZE = 264  # the bytes, the special tokens, one merge, and padding

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def source_checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    return make_checkpoint(folder, family, vocab_size=VOCAB_SIZE, **overrides)


def gguf_name(name: str) -> str:
    stem, suffix = name.removeprefix("model.").rsplit(".", 1)
    if stem.startswith("layers."):
        _, layer, part = stem.split(".", 2)
        return f"blk.{layer}.{_LAYER_NAMES[part]}.{suffix}"
    stem = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem]
    return f"{stem}.{suffix}"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row by row: dimension i of a head goes to 2 i, dimension i + D / 2 to 2 i + 1."""
    head_dim = len(weight) // num_heads
    out = np.empty_like(weight)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weight[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weight[head * head_dim + i + head_dim // 2]
    return out


def quantize(weight: np.ndarray, qtype: GGMLQuantizationType) -> np.ndarray:
    """[N, K] float32 -> [N, bytes of a row] uint8, or floats."""
    if qtype == GGMLQuantizationType.Q4_K:
        return quantize_q4_k(weight)
    if qtype == GGMLQuantizationType.Q6_K:
        return quantize_q6_k(weight)
    return gguf.quants.quantize(weight, qtype)


def rounded(weight: np.ndarray, qtype: GGMLQuantizationType) -> np.ndarray:
    """What is left of `weight` [N, K] after it has been stored as `qtype`."""
    return gguf.quants.dequantize(quantize(weight, qtype), qtype).reshape(weight.shape)


def write_gguf(
    checkpoint: Path,
    file: Path,
    qtype: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    other_types: dict[str, GGMLQuantizationType] | None = None,
    freq_factors: list[float] | None = None,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Matrices are stored as `qtype`, or as `other_types` says for the last part of their name.

    `metadata` adds or replaces keys; a value of None leaves the key out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    arch = config["model_type"]
    writer = gguf.GGUFWriter(file, arch)
    values = _metadata(config, arch) | (metadata or {})
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    _add_tokenizer(writer)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if arch == "llama" and ".q_proj." in name:
            weight = permute(weight, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            weight = permute(weight, config["num_key_value_heads"])
        stored = (other_types or {}).get(name.split(".")[-2], qtype)
        if weight.ndim == 1:
            stored = GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quantize(weight, stored), raw_dtype=stored)
    if freq_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(freq_factors, dtype=np.float32))
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    chars = byte_to_char()
    tokens = [*chars, *SPECIAL_TOKENS, "he"]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), VOCAB_SIZE)]
    normal, control, unused = 1, 3, 5
    types = [normal] * 256 + [control] * len(SPECIAL_TOKENS) + [normal]
    types += [unused] * (VOCAB_SIZE - len(types))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e"])
