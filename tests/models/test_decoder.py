"""The decoder against transformers, in float32, for every family and kind of RoPE."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nano.checkpoint.hf_config import KNOWN_ARCHITECTURES
from nano.models.registry import MODEL_CLASSES
from tests.models.whole_prompt import (
    decoder_logits,
    hf_logits,
    hf_model,
    load,
    prompt,
    relative_error,
)
from tests.tiny import FAMILIES, make_checkpoint

# Kind -> (config overrides, prompt length). Scaled kinds run past the trained length.
ROPE_KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({}, 300),
    "linear": (
        {"max_position_embeddings": 128, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        400,
    ),
    "dynamic": (
        {"max_position_embeddings": 128, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        400,
    ),
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        400,
    ),
    "yarn": (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
        500,
    ),
}


def write_old_spelling(folder: Path, kind_key: str) -> None:
    """`rope_parameters` back to `rope_scaling` and a top-level `rope_theta`."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {kind_key: kind, **rope}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ROPE_KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_for_every_family_and_rope_kind(tmp_path, family, kind):
    overrides, num_tokens = ROPE_KINDS[kind]
    folder = make_checkpoint(tmp_path, family, **overrides)
    # Dynamic RoPE takes the base of max_model_len; transformers takes that of the prompt.
    max_model_len = num_tokens if kind == "dynamic" else None
    ids = prompt(num_tokens)
    logits = decoder_logits(load(folder, max_model_len=max_model_len), ids)
    assert relative_error(logits, hf_logits(folder, ids)) <= 1e-4


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ROPE_KINDS)
def test_the_older_rope_spelling_means_the_same(tmp_path, kind, kind_key):  # B116
    overrides, _ = ROPE_KINDS[kind]
    folder = make_checkpoint(tmp_path, "llama", rope_theta=500.0, **overrides)
    write_old_spelling(folder, kind_key)
    reference = hf_model(folder)
    for num_tokens in (10, 100, 400):
        max_model_len = num_tokens if kind == "dynamic" else None
        ids = prompt(num_tokens)
        logits = decoder_logits(load(folder, max_model_len=max_model_len), ids)
        assert relative_error(logits, hf_logits(reference, ids)) <= 1e-4, num_tokens


@pytest.mark.parametrize(
    "extra",
    [
        {"attention_factor": 1.3},
        {"beta_fast": 8.0, "beta_slow": 2.0},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {"truncate": False},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_every_yarn_parameter_is_applied_as_in_transformers(tmp_path, extra):  # B118
    scaling = ROPE_KINDS["yarn"][0]["rope_scaling"]
    folder = make_checkpoint(tmp_path, "llama", rope_scaling=scaling | extra)
    model, reference = load(folder), hf_model(folder)
    for num_tokens in (50, 200, 500):
        ids = prompt(num_tokens)
        logits = decoder_logits(model, ids)
        assert relative_error(logits, hf_logits(reference, ids)) <= 1e-4, num_tokens


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 32}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
        ("mistral", {"head_dim": 8}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "head_dim": 32}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_every_flag_of_a_family_is_applied_as_in_transformers(tmp_path, family, overrides):
    folder = make_checkpoint(tmp_path, family, **overrides)
    ids = prompt(64)
    assert relative_error(decoder_logits(load(folder), ids), hf_logits(folder, ids)) <= 1e-4


def test_a_window_as_long_as_the_context_equals_full_attention(tmp_path):
    folder = make_checkpoint(tmp_path, "mistral", sliding_window=48)
    model = load(folder)
    assert model.config.max_model_len == 48
    ids = prompt(48)
    assert relative_error(decoder_logits(model, ids), hf_logits(folder, ids)) <= 1e-4


def test_a_float64_model_computes_everything_in_float64(tmp_path):
    scaling = ROPE_KINDS["yarn"][0]["rope_scaling"]
    model = load(make_checkpoint(tmp_path, "qwen3", rope_scaling=scaling), torch.float64)
    logits = decoder_logits(model, prompt(200))
    assert logits.dtype == torch.float64
    # Had any part rounded to float32, a 1e-12 change of the weights would be lost there.
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-12)
    moved = relative_error(decoder_logits(model, prompt(200)), logits)
    assert 0.0 < moved < 1e-9


def test_logits_of_a_16_bit_model_are_float32(tmp_path):
    for family in ("llama", "qwen2"):
        folder = make_checkpoint(tmp_path / family, family, tie_word_embeddings=family == "qwen2")
        model = load(folder, torch.bfloat16)
        hidden = torch.randn(3, model.config.hidden_size, dtype=torch.bfloat16)
        assert model.compute_logits(hidden).dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_only_rows_that_are_wanted_pass_through_the_end_of_the_last_layer(tmp_path, family):
    model = load(make_checkpoint(tmp_path, family, num_hidden_layers=3), torch.float64)
    num_rows: list[int] = []
    for layer in model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp):
            part.register_forward_hook(lambda module, args, out: num_rows.append(len(args[0])))
    rows = torch.tensor([39, 2, 17, 2])
    logits = decoder_logits(model, prompt(40), rows)
    assert num_rows == [40, 40, 40, 40, 4, 4]
    assert relative_error(logits, decoder_logits(model, prompt(40))[rows]) < 1e-12


def test_logits_of_a_position_do_not_depend_on_later_tokens(tmp_path):
    model = load(make_checkpoint(tmp_path), torch.float64)
    ids = prompt(32)
    torch.testing.assert_close(
        decoder_logits(model, ids[:20]), decoder_logits(model, ids)[:20], rtol=0, atol=1e-12
    )


def test_kv_specs_name_every_layer_with_its_cached_shape(tmp_path):
    specs = load(make_checkpoint(tmp_path, num_hidden_layers=3)).kv_specs("float32")
    assert [spec.name for spec in specs] == ["layers.0", "layers.1", "layers.2"]
    assert {(s.num_kv_heads, s.head_dim, s.dtype, s.role) for s in specs} == {
        (2, 16, "float32", "target")
    }


def test_every_architecture_that_the_config_accepts_has_a_class():
    assert set(MODEL_CLASSES) == set(KNOWN_ARCHITECTURES)
