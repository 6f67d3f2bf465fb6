"""convert_gguf: a GGUF file -> a folder of the Hugging Face kind. Torch-free.

Weights are dequantised to float32, which holds every ggml format exactly, one tensor at a time.
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
from nano.checkpoint.gguf_tokenizer import write_tokenizer
from nano.checkpoint.hf_config import CONFIG_FILE, GENERATION_CONFIG_FILE
from nano.checkpoint.safetensors_writer import write_float32
from nano.errors import CheckpointError
from nano.log import get_logger

logger = get_logger(__name__)

CONVERTER_VERSION = 1  # part of the cache key: raise it when the same file converts differently

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
        source = _GgufFile.open(file)
        _write_folder(source, folder)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    logger.info(
        "converted %s: %.2f GB to %.2f GB of float32 in %.1f s",
        file,
        file.stat().st_size / 1e9,
        sum(4 * tensor.n_elements for tensor in source.tensors.values()) / 1e9,
        time.perf_counter() - start,
    )


@dataclass(frozen=True)
class _GgufFile:
    """An opened GGUF file: its metadata as plain values, its tensors still on disk."""

    metadata: dict[str, Any]
    tensors: dict[str, Any]  # Hugging Face name -> gguf's ReaderTensor
    freq_factors: list[float] | None

    @classmethod
    def open(cls, file: Path) -> "_GgufFile":
        try:
            # Optional: only GGUF files need it, and it is slow to import.
            from gguf import GGUFReader
        except ImportError as error:
            raise CheckpointError(
                "GGUF needs the gguf package: pip install 'nano-engine[gguf]'"
            ) from error
        try:
            reader = GGUFReader(file)
            metadata = {key: field.contents() for key, field in reader.fields.items()}
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"not a complete GGUF file: {error}") from error
        num_parts = metadata.get("split.count", 1)
        if num_parts > 1:
            raise CheckpointError(f"split.count is {num_parts}; merge the parts into one file")
        tensors, freq_factors = {}, None
        for tensor in reader.tensors:
            if tensor.name == _FREQ_FACTORS_TENSOR:
                freq_factors = _dequantize(tensor).tolist()
            else:
                tensors[_hf_name(tensor.name)] = tensor
        return cls(metadata, tensors, freq_factors)


def _write_folder(source: _GgufFile, folder: Path) -> None:
    embedding = source.tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError("it holds no tensor token_embd.weight")
    vocab_size = _shape(embedding)[0]
    config = hf_config(source.metadata, source.tensors.keys(), vocab_size, source.freq_factors)
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_CONFIG_FILE, token_ids(source.metadata))
    write_tokenizer(source.metadata, folder)
    shapes = {name: _shape(tensor) for name, tensor in source.tensors.items()}
    write_float32(folder / "model.safetensors", shapes, _weights(source, config))


def _weights(source: _GgufFile, config: dict[str, Any]) -> Iterator[np.ndarray]:
    num_heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    is_permuted = source.metadata["general.architecture"] == "llama"
    for name, tensor in tqdm(source.tensors.items(), desc="converting GGUF"):
        weight = _dequantize(tensor)
        permuted = _PERMUTED.fullmatch(name)
        if is_permuted and permuted:
            weight = _pair_halves(weight, num_heads[permuted[1]])
        yield weight


def _pair_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of q and k rows in llama files.

    There the two dimensions that RoPE turns together are neighbours (0 1 | 2 3 | ...); here they
    are half a head apart.
    """
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _dequantize(tensor: Any) -> np.ndarray:
    from gguf.quants import dequantize

    try:
        weight: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"tensor {tensor.name} has type {tensor.tensor_type.name}, which cannot be dequantised"
        ) from error
    return weight.reshape(_shape(tensor))


def _shape(tensor: Any) -> tuple[int, ...]:
    """Row-major, as everywhere but in GGUF."""
    return tuple(int(size) for size in reversed(tensor.shape))


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
