"""convert_gguf: a GGUF file -> a folder of the Hugging Face kind. Torch-free.

Matrices of a type that we have a kernel for keep their quantised blocks, byte by byte; floats stay
what they are. Other types are dequantised to float32, which holds every ggml format exactly.
"""

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nano.checkpoint.gguf_config import hf_config, token_ids
from nano.checkpoint.gguf_file import GgufFile, GgufTensor, dequantize
from nano.checkpoint.gguf_tokenizer import write_tokenizer
from nano.checkpoint.hf_config import CONFIG_FILE, GENERATION_CONFIG_FILE
from nano.checkpoint.quantization_config import (
    GGUF_PACKED_TYPES,
    QUANTIZATION_KEY,
    gguf_quantization,
)
from nano.checkpoint.safetensors_writer import FLOAT_TYPES, TensorEntry, write_safetensors
from nano.errors import CheckpointError
from nano.log import get_logger

logger = get_logger(__name__)

CONVERTER_VERSION = 2  # part of the cache key: raise it when the same file converts differently

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_FREQ_FACTORS_TENSOR = "rope_freqs.weight"
_PERMUTED = re.compile(r".*\.self_attn\.([qk])_proj\.(weight|bias)")


def convert_gguf(file: Path, folder: Path) -> None:
    """Fill the existing `folder` with config, generation config, weights and tokenizer.

    Raises `CheckpointError` naming the file and the key, tensor or quantisation type that nano
    does not read, or the package that is missing.
    """
    start = time.perf_counter()
    try:
        stored = _write_folder(_Source.open(file), folder)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    logger.info(
        "converted %s: %.2f GB to %.2f GB in %.1f s; %d matrices keep their blocks, %d tensors "
        "became float32",
        file,
        file.stat().st_size / 1e9,
        sum(each.entry.num_bytes for each in stored.values()) / 1e9,
        time.perf_counter() - start,
        sum(each.packed_type is not None for each in stored.values()),
        sum(each.is_dequantized for each in stored.values()),
    )


@dataclass(frozen=True)
class _Source:
    """An opened GGUF file, its tensors under their Hugging Face names."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    freq_factors: list[float] | None

    @classmethod
    def open(cls, file: Path) -> "_Source":
        opened = GgufFile.open(file)
        num_parts = opened.metadata.get("split.count", 1)
        if num_parts > 1:
            raise CheckpointError(f"split.count is {num_parts}; merge the parts into one file")
        tensors, freq_factors = {}, None
        for tensor in opened.tensors:
            if tensor.name == _FREQ_FACTORS_TENSOR:
                freq_factors = dequantize(tensor).tolist()
            else:
                tensors[_hf_name(tensor.name)] = tensor
        return cls(opened.metadata, tensors, freq_factors)


@dataclass(frozen=True, slots=True)
class _Stored:
    """How the conversion stores a tensor: raw blocks of `packed_type`, or floats."""

    entry: TensorEntry
    packed_type: str | None
    is_dequantized: bool

    @classmethod
    def of(cls, tensor: GgufTensor) -> "_Stored":
        kind = tensor.type.name
        if kind in GGUF_PACKED_TYPES and len(tensor.shape) == 2:
            return cls(TensorEntry("U8", tensor.data.shape), kind, False)
        if kind in FLOAT_TYPES:
            return cls(TensorEntry(kind, tensor.shape), None, False)
        return cls(TensorEntry("F32", tensor.shape), None, True)


def _write_folder(source: _Source, folder: Path) -> dict[str, _Stored]:
    embedding = source.tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError("it holds no tensor token_embd.weight")
    config = hf_config(
        source.metadata, source.tensors.keys(), embedding.shape[0], source.freq_factors
    )
    stored = {name: _Stored.of(tensor) for name, tensor in source.tensors.items()}
    types = {name: each.packed_type for name, each in stored.items() if each.packed_type}
    if types:
        config[QUANTIZATION_KEY] = gguf_quantization(types)
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_CONFIG_FILE, token_ids(source.metadata))
    write_tokenizer(source.metadata, folder)
    entries = {name: each.entry for name, each in stored.items()}
    write_safetensors(folder / "model.safetensors", entries, _weights(source, config, stored))
    return stored


def _weights(
    source: _Source, config: dict[str, Any], stored: dict[str, _Stored]
) -> Iterator[np.ndarray]:
    num_heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    is_permuted = source.metadata["general.architecture"] == "llama"
    for name, tensor in tqdm(source.tensors.items(), desc="converting GGUF"):
        weight = _values(tensor, stored[name])
        permuted = _PERMUTED.fullmatch(name)
        if is_permuted and permuted:
            weight = _pair_halves(weight, num_heads[permuted[1]])
        yield weight


def _values(tensor: GgufTensor, stored: _Stored) -> np.ndarray:
    """Row by row either way, so that rows may be put in order whether or not they are blocks."""
    if stored.is_dequantized:
        return dequantize(tensor)
    return tensor.data.view(stored.entry.numpy_type).reshape(stored.entry.shape)


def _pair_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of q and k rows in llama files.

    There the two dimensions that RoPE turns together are neighbours (0 1 | 2 3 | ...); here they
    are half a head apart.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    match = _TENSOR_NAME.fullmatch(name)
    if match:
        layer, part, suffix = match.groups()
        names = _GLOBAL_NAMES if layer is None else _LAYER_NAMES
        if part in names:
            prefix = "" if layer is None else f"model.layers.{layer}."
            return f"{prefix}{names[part]}.{suffix}"
    raise CheckpointError(f"tensor {name} has no place in a dense decoder")


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
