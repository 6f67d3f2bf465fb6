"""DecoderConfig: what config.json and generation_config.json say of a dense decoder. Torch-free.

A key that is absent takes the default of its family's Hugging Face config class, so a checkpoint
means the same here as there. What nano would compute differently is refused by the key's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nano.checkpoint.json_fields import JsonFields
from nano.checkpoint.quantization_config import QuantizationConfig, read_quantization_config
from nano.checkpoint.rope_config import RopeConfig, read_rope_config

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

# generation_config.json's names -> fields of SamplingParams.
_SAMPLING_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_SAMPLING_INTEGERS = {"top_k": "top_k", "max_new_tokens": "max_tokens"}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Defaults of one architecture's Hugging Face config class, and what its code fixes."""

    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    # None: the config's attention_bias decides, for o_proj too
    qkv_bias: bool | None = None
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    has_window: bool = False  # every layer slides
    has_window_switch: bool = False  # use_sliding_window, for the layers from max_window_layers


_FAMILIES = {
    "LlamaForCausalLM": _Family(
        vocab_size=32_000,
        intermediate_size=11_008,
        max_position_embeddings=2048,
        reads_mlp_bias=True,
    ),
    "MistralForCausalLM": _Family(
        vocab_size=32_000,
        intermediate_size=14_336,
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        qkv_bias=False,
        has_window=True,
    ),
    "Qwen2ForCausalLM": _Family(
        vocab_size=151_936,
        intermediate_size=22_016,
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        qkv_bias=True,
        has_window_switch=True,
    ),
    "Qwen3ForCausalLM": _Family(
        vocab_size=151_936,
        intermediate_size=22_016,
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        head_dim=128,
        qk_norm=True,
        has_window_switch=True,
    ),
}
KNOWN_ARCHITECTURES = tuple(_FAMILIES)
_DEFAULT_HIDDEN_SIZE, _DEFAULT_NUM_LAYERS, _DEFAULT_NUM_HEADS = 4096, 32, 32
_DEFAULT_SLIDING_WINDOW, _DEFAULT_MAX_WINDOW_LAYERS = 4096, 28


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A dense decoder's shape and habits, checked and with every default filled in.

    `max_model_len` is the longest context in tokens that the checkpoint serves as trained, for
    the reason in words beside it; only with `can_extend_context` may a caller exceed it.
    `sliding_window` is set only where it is what limits that length. `quantization` None means
    that all weights are floats. `eos_token_ids` is empty if the files name none.
    `default_sampling` holds `SamplingParams` fields.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    max_position_embeddings: int
    max_model_len: int
    max_model_len_reason: str
    sliding_window: int | None
    can_extend_context: bool
    dtype: str  # of the stored weights, as the checkpoint says: "bfloat16", ...
    quantization: QuantizationConfig | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    default_sampling: Mapping[str, float | int]


def load_decoder_config(folder: Path) -> DecoderConfig:
    """Read a checkpoint's configuration. Raises `CheckpointError` naming file, key and value."""
    config = JsonFields.read(folder / CONFIG_FILE)
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_unsupported(config)

    hidden_size = config.integer("hidden_size", _DEFAULT_HIDDEN_SIZE)
    num_layers = config.integer("num_hidden_layers", _DEFAULT_NUM_LAYERS)
    num_heads = config.integer("num_attention_heads", _DEFAULT_NUM_HEADS)
    num_kv_heads = _num_kv_heads(config, family, num_heads)
    head_dim = _head_dim(config, family, hidden_size, num_heads)
    has_attention_bias = config.boolean("attention_bias", False)
    max_position = config.integer("max_position_embeddings", family.max_position_embeddings)
    rope = read_rope_config(config, head_dim, max_position)
    max_model_len, reason = rope.max_length(max_position)
    window = _sliding_window(config, family, num_layers)
    # A longer context would also outgrow the window.
    can_extend_context = rope.kind == "dynamic" and window is None
    if window is not None and window < max_model_len:
        max_model_len = window
        reason = f"sliding window {window}: nano attends to whole contexts, which agrees up to it"
    else:
        window = None
    generation = _generation_config(folder)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=config.integer("vocab_size", family.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", family.intermediate_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6, low=0.0),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        qkv_bias=has_attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=has_attention_bias if family.qkv_bias is None else False,
        mlp_bias=family.reads_mlp_bias and config.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        rope=rope,
        max_position_embeddings=max_position,
        max_model_len=max_model_len,
        max_model_len_reason=reason,
        sliding_window=window,
        can_extend_context=can_extend_context,
        dtype=config.text("dtype", config.text("torch_dtype", "float32")),
        quantization=read_quantization_config(config),
        eos_token_ids=generation.token_ids("eos_token_id") or config.token_ids("eos_token_id"),
        bos_token_id=_bos_token_id(generation, config),
        default_sampling=_default_sampling(generation),
    )


def _architecture(config: JsonFields) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in KNOWN_ARCHITECTURES:
        raise config.error("architectures", f"nano runs one of {', '.join(KNOWN_ARCHITECTURES)}")
    return str(names[0])


def _refuse_unsupported(config: JsonFields) -> None:
    if config.text("hidden_act", "silu") != "silu":
        raise config.error("hidden_act", "nano computes silu only")


def _num_kv_heads(config: JsonFields, family: _Family, num_heads: int) -> int:
    default = num_heads
    if "num_key_value_heads" not in config.values and family.num_key_value_heads is not None:
        default = family.num_key_value_heads
    num_kv_heads = config.integer("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_attention_heads", f"it must be a multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(config: JsonFields, family: _Family, hidden_size: int, num_heads: int) -> int:
    if "head_dim" not in config.values and family.head_dim is not None:
        return family.head_dim
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.error("hidden_size", f"it must be a multiple of the {num_heads} heads")
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise config.error("head_dim", f"RoPE needs an even head dimension, not {head_dim}")
    return head_dim


def _sliding_window(config: JsonFields, family: _Family, num_layers: int) -> int | None:
    """The window in tokens if some layer of the model slides."""
    if family.has_window_switch:
        if not config.boolean("use_sliding_window", False) or not _any_layer_slides(
            config, num_layers
        ):
            return None
    elif not family.has_window:
        return None
    if "sliding_window" in config.values and config.get("sliding_window") is None:
        return None
    return config.integer("sliding_window", _DEFAULT_SLIDING_WINDOW)


def _any_layer_slides(config: JsonFields, num_layers: int) -> bool:
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, low=0)
        return first < num_layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or any(kind not in known for kind in layer_types):
        raise config.error("layer_types", "nano knows full_attention and sliding_attention")
    return "sliding_attention" in layer_types


def _generation_config(folder: Path) -> JsonFields:
    file = folder / GENERATION_CONFIG_FILE
    return JsonFields.read(file) if file.exists() else JsonFields(file, {})


def _bos_token_id(generation: JsonFields, config: JsonFields) -> int | None:
    for fields in (generation, config):
        if fields.get("bos_token_id") is not None:
            return fields.integer("bos_token_id", low=0)
    return None


def _default_sampling(generation: JsonFields) -> dict[str, float | int]:
    defaults: dict[str, float | int] = {}
    for key in _SAMPLING_NUMBERS:
        if generation.get(key) is not None:
            defaults[key] = generation.number(key)
    for key, name in _SAMPLING_INTEGERS.items():
        if generation.get(key) is not None:
            defaults[name] = generation.integer(key, low=-1)
    return defaults
