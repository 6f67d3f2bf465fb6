"""A GGUF file's metadata as the config.json it was once converted from. Torch-free.

Metadata keys are "{architecture}.name". What nano would compute differently is refused by the
key's name, as in `hf_config`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from nano.checkpoint.rope_config import FREQ_FACTORS_KEY
from nano.errors import CheckpointError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_KEYS = {"freq_base", "dimension_count", "scale_linear"}
_ROPE_SCALING_KEYS = {
    "type",
    "factor",
    "original_context_length",
    "finetuned",  # says how the weights were made; nothing to compute
    "attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
}
# Every token that ends a turn; llama.cpp stops at any of them.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def hf_config(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    vocab_size: int,
    freq_factors: list[float] | None,
) -> dict[str, Any]:
    """config.json for `metadata`; `tensor_names` (Hugging Face's) tell biases and tied output."""
    arch = metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise CheckpointError(
            f"general.architecture is {arch!r}; nano converts {', '.join(_ARCHITECTURES)}"
        )
    if metadata.get(f"{arch}.attention.sliding_window"):
        raise _refusal(metadata, f"{arch}.attention.sliding_window", "nano has full attention only")
    hidden_size = _integer(metadata, f"{arch}.embedding_length")
    num_heads = _integer(metadata, f"{arch}.attention.head_count")
    head_dim = _integer(metadata, f"{arch}.attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _integer(metadata, f"{arch}.{key}", head_dim) != head_dim:
            raise _refusal(metadata, f"{arch}.{key}", f"it must equal the head size {head_dim}")
    config = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": _integer(metadata, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _integer(metadata, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _integer(metadata, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _integer(metadata, f"{arch}.context_length"),
        "rms_norm_eps": _number(metadata, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(metadata, f"{arch}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata, arch),
        "tie_word_embeddings": "lm_head.weight" not in tensor_names,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensor_names,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in tensor_names,
        "dtype": "float32",
    } | token_ids(metadata)
    if freq_factors is not None:
        config[FREQ_FACTORS_KEY] = freq_factors
    return config


def token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token_id and eos_token_id, which generation_config.json repeats."""
    ids: dict[str, Any] = {}
    eos = [metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
    unique = list(dict.fromkeys(token_id for token_id in eos if token_id is not None))
    if unique:
        ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None:
        ids["bos_token_id"] = bos
    return ids


def _rope_scaling(metadata: Mapping[str, Any], arch: str) -> dict[str, Any] | None:
    known = {f"{arch}.rope.{name}" for name in _ROPE_KEYS}
    known |= {f"{arch}.rope.scaling.{name}" for name in _ROPE_SCALING_KEYS}
    for key in metadata:
        if key.startswith(f"{arch}.rope.") and key not in known:
            raise _refusal(metadata, key, f"nano knows {', '.join(sorted(known))}")
    prefix = f"{arch}.rope.scaling"
    kind = metadata.get(f"{prefix}.type", "none")
    factor_key = f"{prefix}.factor"
    if f"{arch}.rope.scale_linear" in metadata:  # before rope.scaling existed
        kind, factor_key = "linear", f"{arch}.rope.scale_linear"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise _refusal(metadata, f"{prefix}.type", "nano knows none, linear and yarn")
    scaling = {"rope_type": kind, "factor": _number(metadata, factor_key)}
    if kind == "linear":
        return scaling
    if f"{prefix}.attn_factor" in metadata:
        raise _refusal(metadata, f"{prefix}.attn_factor", "nano computes YaRN's own scale only")
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"{prefix}.{key}" in metadata:
            scaling[name] = _number(metadata, f"{prefix}.{key}")
    if f"{prefix}.original_context_length" in metadata:
        scaling["original_max_position_embeddings"] = _integer(
            metadata, f"{prefix}.original_context_length"
        )
    return scaling


def _integer(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        # A list, one value per layer, is how models of unequal layers say it.
        raise _refusal(metadata, key, "it must be one positive integer")
    return value


def _number(metadata: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refusal(metadata, key, "it must be a number")
    return float(value)


def _refusal(metadata: Mapping[str, Any], key: str, wanted: str) -> CheckpointError:
    found = repr(metadata[key])[:80] if key in metadata else "absent"
    return CheckpointError(f"{key} is {found}; {wanted}")
