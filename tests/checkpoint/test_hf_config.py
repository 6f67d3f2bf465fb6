"""What config.json and generation_config.json are taken to say, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from nano.checkpoint.hf_config import load_decoder_config
from nano.errors import CheckpointError
from tests.tiny import FAMILIES, make_checkpoint

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write(folder: Path, generation: dict[str, Any] | None = None, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(TINY | values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_take_the_defaults_of_the_hugging_face_class(tmp_path, family):
    architecture = ARCHITECTURES[family]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    ours, theirs = load_decoder_config(tmp_path), FAMILIES[family]()
    assert ours.architecture == architecture
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == "default"
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.qkv_bias == (family == "qwen2")
    assert not ours.o_bias
    assert not ours.mlp_bias
    assert ours.qk_norm == (family == "qwen3")
    assert ours.sliding_window == (4096 if family == "mistral" else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_transformers_wrote_reads_back(tmp_path, family):
    config = load_decoder_config(make_checkpoint(tmp_path, family, num_hidden_layers=3))
    assert (config.architecture, config.num_layers) == (ARCHITECTURES[family], 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.eos_token_ids, config.bos_token_id) == ((257,), 256)
    assert config.dtype == "float32"
    assert (config.max_model_len, config.can_extend_context) == (512, False)


def test_null_counts_as_absent(tmp_path):
    config = load_decoder_config(
        write(tmp_path, num_key_value_heads=None, head_dim=None, rope_scaling=None)
    )
    assert (config.num_kv_heads, config.head_dim, config.rope.kind) == (4, 16, "default")


def test_head_dim_may_differ_from_hidden_size_over_heads(tmp_path):
    assert load_decoder_config(write(tmp_path, head_dim=32)).head_dim == 32


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_read_under_both_names(tmp_path, key):
    assert load_decoder_config(write(tmp_path, **{key: "bfloat16"})).dtype == "bfloat16"


def test_llama_attention_bias_covers_the_output_projection_and_mistral_has_none(tmp_path):
    llama = load_decoder_config(write(tmp_path, attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    mistral = load_decoder_config(
        write(tmp_path, architectures=["MistralForCausalLM"], attention_bias=True)
    )
    assert (mistral.qkv_bias, mistral.o_bias) == (False, False)


# RoPE and lengths. B116, B118.


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_scaling": LLAMA3, "rope_theta": 5e5},
        {"rope_scaling": {**LLAMA3, "type": "llama3"}, "rope_theta": 5e5},
        {
            "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in LLAMA3.items()},
            "rope_theta": 5e5,
        },
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_parameters": LLAMA3, "rope_theta": 5e5},
    ],
)
def test_every_spelling_of_rope_reads_the_same(tmp_path, spelling):  # B116
    rope = load_decoder_config(write(tmp_path, **spelling)).rope
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 5e5, 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert rope.original_max_position == 64


@pytest.mark.parametrize(
    ("rope", "length", "can_extend", "reason"),
    [
        (None, 512, False, "max_position_embeddings 512"),
        ({"rope_type": "default"}, 512, False, "max_position_embeddings 512"),
        (LLAMA3, 512, False, "max_position_embeddings 512"),
        ({"type": "linear", "factor": 4.0}, 2048, False, "linear RoPE factor 4"),
        ({"type": "dynamic", "factor": 4.0}, 512, True, "dynamic RoPE is unscaled"),
        # B118: the trained length is not multiplied a second time.
        (
            {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128},
            512,
            False,
            "original length 128 x YaRN factor 4",
        ),
        ({"type": "yarn", "factor": 4}, 2048, False, "original length 512 x YaRN factor 4"),
    ],
)
def test_the_context_length_follows_from_the_rope_kind(tmp_path, rope, length, can_extend, reason):
    config = load_decoder_config(write(tmp_path, rope_scaling=rope))
    assert (config.max_model_len, config.can_extend_context) == (length, can_extend)
    assert reason in config.max_model_len_reason


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, 100),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, None),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, None),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 100}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}, None),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 100,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            100,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 100,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            None,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            100,
        ),
    ],
)
def test_a_sliding_window_caps_the_context_only_where_it_is_in_use(tmp_path, values, window):
    config = load_decoder_config(write(tmp_path, **values))
    assert config.sliding_window == window
    assert config.max_model_len == (window or 512)
    assert ("sliding window 100" in config.max_model_len_reason) == (window is not None)


def test_a_sliding_window_keeps_dynamic_rope_from_extending_the_context(tmp_path):
    config = load_decoder_config(
        write(
            tmp_path,
            architectures=["MistralForCausalLM"],
            sliding_window=600,
            rope_scaling={"type": "dynamic", "factor": 2.0},
        )
    )
    assert (config.max_model_len, config.can_extend_context) == (512, False)


# generation_config.json. B119.


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": [0, 5]}, (0, 5)),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": [2, 3]}, {}, (2, 3)),
        ({"eos_token_id": [2, 3]}, {"eos_token_id": None}, (2, 3)),
        ({"eos_token_id": 2}, None, (2,)),
        ({}, {"eos_token_id": [7]}, (7,)),
        ({}, None, ()),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_eos_comes_from_the_generation_config_first(
    tmp_path, in_config, in_generation, expected
):  # B119
    config = load_decoder_config(write(tmp_path, in_generation, **in_config))
    assert config.eos_token_ids == expected


def test_default_sampling_holds_the_generation_configs_parameters(tmp_path):
    generation = {
        "temperature": 0.6,
        "top_p": 1,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_new_tokens": 77,
        "do_sample": True,
        "num_beams": 1,
    }
    config = load_decoder_config(write(tmp_path, generation))
    assert config.default_sampling == {
        "temperature": 0.6,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "max_tokens": 77,
    }


def test_sampling_keys_of_config_json_do_not_count(tmp_path):
    config = load_decoder_config(write(tmp_path, temperature=0.1, top_k=1))
    assert config.default_sampling == {}


# Refusals: each message names the file, the key and the value.


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "architectures is null"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures is"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*; it must be finite"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": [["full_attention"]],
            },
            "layer_types is",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config.quant_method is .*fp8",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"; nano computes silu'),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads is 4.* 3"),
        ({"hidden_size": 66}, "hidden_size is 66.* 4 heads"),
        ({"head_dim": 15}, "head_dim is 15.*even"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "64"}, 'hidden_size is "64"; it must be an integer'),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps.*number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, -2]}, "eos_token_id"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, "rope_scaling.rope_type.*foo"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is .*longrope.*yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "zoom": 1}}, "rope_scaling.zoom is 1"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is absent"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5.*at least 1"),
        ({"rope_scaling": "linear"}, "rope_scaling.*object"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor is 0.5",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters.full_attention",
        ),
        ({"nano_rope_freq_factors": [1.0, 2.0]}, "nano_rope_freq_factors.* 8 positive"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["chunked_attention"],
            },
            "layer_types",
        ),
    ],
)
def test_what_nano_would_compute_wrongly_is_refused_by_name(tmp_path, values, match):
    write(tmp_path, **values)
    with pytest.raises(CheckpointError, match=match) as error:
        load_decoder_config(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("generation", "match"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"eos_token_id": {}}, "eos_token_id"),
    ],
)
def test_a_mistyped_generation_config_is_refused_by_name(tmp_path, generation, match):
    write(tmp_path, generation)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {match}"):
        load_decoder_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\ufffe{}", "[" * 10**5])
def test_an_unparsable_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="utf-16" if "\ufffe" in text else None)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_decoder_config(tmp_path)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_decoder_config(tmp_path)
