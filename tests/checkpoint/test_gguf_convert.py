"""A converted GGUF file against the checkpoint it was made from."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from tokenizers import Tokenizer

from nano.checkpoint.gguf_convert import convert_gguf
from nano.checkpoint.hf_config import load_decoder_config
from nano.errors import CheckpointError
from nano.layers.rotary import inverse_frequencies
from tests.checkpoint.gguf_files import quantize, rounded, source_checkpoint, write_gguf
from tests.models.whole_prompt import decoder_logits, hf_logits, load, prompt, relative_error

GGUF_FAMILIES = ("llama", "qwen2", "qwen3")
PACKED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")
DEQUANTISED_TYPES = ("Q5_1", "TQ1_0", "MXFP4")
# Rows of whole blocks, which have up to 256 weights.
SIZES_FOR_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


def convert(file: Path) -> Path:
    folder = file.parent / "converted"
    folder.mkdir()
    convert_gguf(file, folder)
    return folder


def converted(tmp_path: Path, family: str, qtype="F32", *, gguf_args=None, **overrides):
    """The source checkpoint and the folder its GGUF file converts to."""
    source = source_checkpoint(tmp_path / "source", family, **overrides)
    file = write_gguf(
        source, tmp_path / "tiny.gguf", GGMLQuantizationType[qtype], **(gguf_args or {})
    )
    return source, convert(file)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 32, "rope_theta": 5e5}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 32}),
    ],
    ids=str,
)
def test_logits_of_a_converted_file_equal_those_of_its_source(tmp_path, family, overrides):
    source, folder = converted(tmp_path, family, **overrides)
    ids = prompt(200)
    assert relative_error(decoder_logits(load(folder), ids), hf_logits(source, ids)) <= 1e-4


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_float32_weights_convert_to_the_same_bits(tmp_path, family):
    source, folder = converted(tmp_path, family)
    expected = load_file(source / "model.safetensors")
    actual = load_file(folder / "model.safetensors")
    assert actual.keys() == expected.keys()
    for name, weight in actual.items():
        assert np.array_equal(weight, expected[name]), name


@pytest.mark.parametrize("qtype", ["F16", "BF16"])
def test_half_precision_weights_are_stored_as_they_are(tmp_path, qtype):
    source, folder = converted(tmp_path, "qwen2", qtype)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[qtype]
    expected = load_torch_file(source / "model.safetensors")
    for name, weight in load_torch_file(folder / "model.safetensors").items():
        assert weight.dtype == (dtype if weight.ndim == 2 else torch.float32), name
        assert torch.equal(weight, expected[name].to(weight.dtype)), name


@pytest.mark.parametrize("qtype", PACKED_TYPES)
def test_blocks_of_types_with_a_kernel_are_kept_byte_by_byte(tmp_path, qtype):
    source, folder = converted(tmp_path, "qwen2", qtype, **SIZES_FOR_BLOCKS)
    kind = GGMLQuantizationType[qtype]
    types = json.loads((folder / "config.json").read_text())["quantization_config"]["tensor_types"]
    expected = load_file(source / "model.safetensors")
    actual = load_file(folder / "model.safetensors")
    assert types == {name: qtype for name, weight in expected.items() if weight.ndim == 2}
    for name, weight in actual.items():
        original = expected[name]
        assert np.array_equal(weight, quantize(original, kind) if name in types else original), name


@pytest.mark.parametrize("qtype", DEQUANTISED_TYPES)
def test_other_types_become_float32(tmp_path, qtype):
    source, folder = converted(tmp_path, "qwen2", qtype, **SIZES_FOR_BLOCKS)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    expected = load_file(source / "model.safetensors")
    for name, weight in load_file(folder / "model.safetensors").items():
        original = expected[name]
        if original.ndim == 2:
            original = rounded(original, GGMLQuantizationType[qtype])
        assert weight.dtype == np.float32
        assert np.array_equal(weight, original), name


@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_1", "Q5_1", "F16"])
def test_rows_are_put_in_order_whether_or_not_they_are_blocks(tmp_path, qtype):
    """Rows are quantised on their own, so permuting them commutes with it."""
    source, folder = converted(tmp_path, "llama", qtype)
    name = "model.layers.1.self_attn.k_proj.weight"
    kind = GGMLQuantizationType[qtype]
    original = load_file(source / "model.safetensors")[name]
    expected = rounded(original, kind) if qtype == "Q5_1" else quantize(original, kind)
    assert np.array_equal(load_file(folder / "model.safetensors")[name], expected)


def test_a_packed_file_takes_no_more_room_than_its_gguf(tmp_path):
    _, folder = converted(tmp_path, "llama", "Q4_0", **SIZES_FOR_BLOCKS)
    packed = (folder / "model.safetensors").stat().st_size
    assert packed < (tmp_path / "tiny.gguf").stat().st_size + 16_384  # its table of contents


def test_the_configuration_and_its_token_ids_carry_over(tmp_path):
    source, folder = converted(
        tmp_path,
        "llama",
        rms_norm_eps=1e-5,
        gguf_args={"metadata": {"tokenizer.ggml.eot_token_id": 259}},
    )
    before, after = load_decoder_config(source), load_decoder_config(folder)
    assert after.eos_token_ids == (257, 259)
    assert after.bos_token_id == before.bos_token_id == 256
    assert after.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)
    for name in ("vocab_size", "num_heads", "num_kv_heads", "head_dim", "max_model_len"):
        assert getattr(after, name) == getattr(before, name), name


def test_the_tokenizer_is_written(tmp_path):
    _, folder = converted(tmp_path, "llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("he<|im_end|>", add_special_tokens=False).ids
    assert ids == [260, 259]


def test_rope_freqs_become_divisors_of_the_frequencies(tmp_path):
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    _, folder = converted(tmp_path, "llama", gguf_args={"freq_factors": factors})
    rope = load_decoder_config(folder).rope
    plain = inverse_frequencies(
        load_decoder_config(tmp_path / "source").rope, 16, 512, torch.float32
    )
    divided = inverse_frequencies(rope, 16, 512, torch.float32)
    torch.testing.assert_close(plain / divided, torch.tensor(factors))


@pytest.mark.parametrize(
    ("metadata", "kind", "factor", "max_model_len"),
    [
        ({"scaling.type": "none"}, "default", 1.0, 512),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, "linear", 4.0, 2048),
        ({"scale_linear": 2.0}, "linear", 2.0, 1024),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, "yarn", 4.0, 2048),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 128,
                "scaling.finetuned": True,
            },
            "yarn",
            4.0,
            512,
        ),
    ],
)
def test_rope_scaling_carries_over(tmp_path, metadata, kind, factor, max_model_len):
    metadata = {f"qwen2.rope.{key}": value for key, value in metadata.items()}
    _, folder = converted(tmp_path, "qwen2", gguf_args={"metadata": metadata})
    config = load_decoder_config(folder)
    assert (config.rope.kind, config.rope.factor) == (kind, factor)
    assert config.max_model_len == max_model_len


def test_yarn_betas_carry_over(tmp_path):
    metadata = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.yarn_beta_fast": 16.0,
        "qwen2.rope.scaling.yarn_beta_slow": 2.0,
    }
    _, folder = converted(tmp_path, "qwen2", gguf_args={"metadata": metadata})
    rope = load_decoder_config(folder).rope
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 2.0)


def test_optional_keys_may_be_absent(tmp_path):
    absent = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    metadata = {f"llama.{key}": None for key in absent}
    _, folder = converted(tmp_path, "llama", gguf_args={"metadata": metadata})
    assert load_decoder_config(folder).head_dim == 16


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8.* 16"),
        ({"llama.attention.value_length": 8}, "attention.value_length is 8.* 16"),
        ({"llama.attention.sliding_window": 64}, "attention.sliding_window is 64"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.alpha": 2.0}, "rope.scaling.alpha is 2.0"),
        ({"llama.context_length": None}, "llama.context_length is absent"),
        ({"llama.feed_forward_length": [128, 64]}, "feed_forward_length is .128, 64."),
        ({"split.count": 3}, "split.count is 3"),
        ({"tokenizer.ggml.pre": "martian"}, "tokenizer.ggml.pre.*martian"),
    ],
)
def test_metadata_that_nano_does_not_apply_is_refused_by_key(tmp_path, metadata, match):
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: .*{match}"):
        converted(tmp_path, "llama", gguf_args={"metadata": metadata})


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'gemma3'; nano converts llama, qwen2, qwen3"):
        convert(tmp_path / "tiny.gguf")


def test_an_unknown_tensor_is_refused_by_name(tmp_path):
    extra = {"blk.0.ffn_gate_exps.weight": np.zeros((2, 4, 4), dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        converted(tmp_path, "llama", gguf_args={"extra_tensors": extra})


def test_a_type_that_cannot_be_dequantised_is_refused_by_name(tmp_path):
    extra = {"blk.0.attn_q.bias": np.zeros(64, dtype=np.int8)}
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.bias has type I8"):
        converted(tmp_path, "llama", gguf_args={"extra_tensors": extra})


@pytest.mark.parametrize("num_bytes", [0, 3, 100, 5000, -50])
def test_a_damaged_file_is_named(tmp_path, num_bytes):
    file = write_gguf(source_checkpoint(tmp_path / "source", "llama"), tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: not a complete GGUF file"):
        convert(file)


def test_without_the_gguf_package_files_of_known_types_convert_all_the_same(tmp_path, monkeypatch):
    file = write_gguf(
        source_checkpoint(tmp_path / "source", "qwen2", **SIZES_FOR_BLOCKS),
        tmp_path / "tiny.gguf",
        GGMLQuantizationType.Q4_K,
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert load_decoder_config(convert(file)).hidden_size == 256


def test_without_the_gguf_package_the_remedy_for_other_types_is_named(tmp_path, monkeypatch):
    file = write_gguf(
        source_checkpoint(tmp_path / "source", "qwen2"),
        tmp_path / "tiny.gguf",
        GGMLQuantizationType.Q5_1,
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"type 7, which needs .*'nano-engine\[gguf\]'"):
        convert(file)


def test_transformers_reads_the_converted_folder_too(tmp_path):
    source, folder = converted(tmp_path, "qwen3")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
    ids = prompt(50)
    assert relative_error(hf_logits(folder, ids), hf_logits(source, ids)) <= 1e-4
