"""What quantization_config and the files of old say, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from nano.checkpoint.fingerprint import weights_fingerprint
from nano.checkpoint.hf_config import load_decoder_config
from nano.checkpoint.quantization_config import AwqConfig, GgufConfig, GptqConfig
from nano.errors import CheckpointError

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def read(folder: Path, quantization: dict[str, Any] | None, **files: dict[str, Any]):
    config = CONFIG if quantization is None else CONFIG | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return load_decoder_config(folder).quantization


def test_a_checkpoint_that_says_nothing_holds_floats(tmp_path):
    assert read(tmp_path, None) is None


@pytest.mark.parametrize("size", [32, 64, 128])
def test_awq_is_read_with_its_group_size(tmp_path, size):
    assert read(tmp_path, AWQ | {"group_size": size}) == AwqConfig(group_size=size)


def test_a_group_size_of_minus_one_is_the_whole_row(tmp_path):
    assert read(tmp_path, AWQ | {"group_size": -1}) == AwqConfig(group_size=None)
    assert read(tmp_path, GPTQ | {"group_size": -1}).group_size is None


@pytest.mark.parametrize("name", ["quant_config", "quantize_config"])
def test_awq_is_read_from_the_file_that_its_first_tools_wrote(tmp_path, name):
    old = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    assert read(tmp_path, None, **{name: old}) == AwqConfig(group_size=64)


def test_gptq_is_read_from_the_file_that_its_first_tools_wrote(tmp_path):
    old = {key: value for key, value in GPTQ.items() if key != "quant_method"}
    expected = GptqConfig(group_size=128, zeros="less_one", needs_g_idx=False)
    assert read(tmp_path, None, quantize_config=old) == expected


def test_config_json_goes_before_a_file_of_old(tmp_path):
    assert read(tmp_path, AWQ, quantize_config=GPTQ) == AwqConfig(group_size=128)


@pytest.mark.parametrize(
    ("extra", "zeros"),
    [
        ({}, "less_one"),
        ({"checkpoint_format": "gptq"}, "less_one"),
        ({"checkpoint_format": "gptq", "meta": {"quantizer": ["optimum:1.2"]}}, "less_one"),
        ({"meta": {"quantizer": "gptqmodel:1.4.0"}}, "borrowed"),
        ({"meta": {"quantizer": ["optimum:1.2", "gptqmodel:1.4.0"]}}, "borrowed"),
        ({"checkpoint_format": "gptq_v2"}, "plain"),
        ({"checkpoint_format": "gptq_v2", "meta": {"quantizer": "gptqmodel:1.4.0"}}, "plain"),
        ({"format": "gptq_v2"}, "plain"),
    ],
    ids=str,
)
def test_how_gptq_stores_zero_points_depends_on_the_format_and_the_tool(tmp_path, extra, zeros):
    assert read(tmp_path, GPTQ | extra).zeros == zeros


@pytest.mark.parametrize(
    "extra",
    [
        {"sym": False, "damp_percent": 0.1, "true_sequential": True, "static_groups": False},
        {"lm_head": True},
        {"dynamic": {r"-:.*\.down_proj": {}}},
        {"modules_in_block_to_quantize": [["self_attn.q_proj"]]},
    ],
    ids=str,
)
def test_what_the_tensors_themselves_tell_may_stand_in_the_config(tmp_path, extra):
    assert read(tmp_path, GPTQ | extra).group_size == 128


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        ({}, "quantization_config.quant_method is absent"),
        ({"quant_method": "fp8"}, "quant_method is .*fp8.*awq, gptq and gguf"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is .*bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "quant_method is .*compressed-tensors"),
        (AWQ | {"bits": 8}, "bits is 8; nano reads 4-bit"),
        (GPTQ | {"bits": 3}, "bits is 3; nano reads 4-bit"),
        (AWQ | {"version": "gemv"}, "version is .*gemv.*gemm only"),
        (AWQ | {"format": "gemv_fast"}, "format is .*gemv_fast"),
        (AWQ | {"backend": "llm-awq"}, "backend is .*llm-awq"),
        (AWQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"group_size": 40}, "group_size is 40; .* multiple of 16"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is .*marlin.*gptq_v2"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype is .*int8"),
        (GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}}, "dynamic is .*down_proj"),
        ({"quant_method": "gguf", "tensor_types": {"a": "Q2_K"}}, "'Q2_K' is none of Q4_0"),
    ],
    ids=str,
)
def test_other_methods_versions_and_widths_are_refused_by_key_and_value(
    tmp_path, quantization, match
):
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{match}"):
        read(tmp_path, quantization)


def test_a_conversion_of_ours_names_the_type_of_each_tensor(tmp_path):
    types = {"model.layers.0.mlp.up_proj.weight": "Q4_K"}
    assert read(tmp_path, {"quant_method": "gguf", "tensor_types": types}) == GgufConfig(
        tensor_types=types
    )


def test_the_fingerprint_covers_a_file_of_old(tmp_path):
    """The same tensors mean other weights when the zero points are stored otherwise."""
    fingerprints = set()
    for extra in ({}, {"checkpoint_format": "gptq_v2"}):
        read(tmp_path, None, quantize_config=GPTQ | extra)
        fingerprints.add(weights_fingerprint(tmp_path))
    assert len(fingerprints) == 2
