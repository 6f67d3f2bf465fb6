"""`quantization=`: what it does to each layer, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from nano.config import EngineConfig
from nano.errors import CheckpointError, ConfigError
from nano.layers.kernels import TorchKernels
from nano.layers.linear import Linear
from nano.layers.native_kernels import NativeKernels
from nano.layers.packed_weight import PackedWeight
from nano.layers.row_kernels import RowKernels
from nano.models.decoder import Decoder
from nano.models.weights import storage_formats
from nano.quant.schemes import quantize
from nano.resolve import resolve
from tests.checkpoint.gguf_files import source_checkpoint, write_gguf
from tests.models.int4_files import awq_tensors, gptq_tensors, write_int4
from tests.models.whole_prompt import decoder_logits, load, prompt, relative_error
from tests.tiny import make_checkpoint

needs_compiler = pytest.mark.skipif(not NativeKernels.is_available(), reason="no C++ compiler")
WEIGHT_SCHEMES = ("int8", "int4")
ACTIVATION_SCHEMES = ("w8a8", "w4a8")
OUTPUT_SCHEME = "int8"
INT4 = {"bits": 4, "group_size": 32}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(folder, "qwen2", tie_word_embeddings=request.param)


def weights(model: Decoder) -> dict[str, Tensor]:
    """What every linear layer multiplies by, and what the embedding looks up."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            found[path] = module.packed.dequantized() if module.packed else module.weight
    found["embed_tokens"] = model.embed_tokens(torch.arange(model.config.vocab_size))
    return found


def expected_weights(checkpoint: Path, scheme: str) -> dict[str, Tensor]:
    """The float weights, each rounded on its own: all but the untied embedding."""
    floats = load(checkpoint)
    is_tied = floats.lm_head is None
    expected = {}
    for path, weight in weights(floats).items():
        is_output = path == "lm_head" or (path == "embed_tokens" and is_tied)
        if scheme == "bfloat16":
            expected[path] = weight.bfloat16().float()
        elif path == "embed_tokens" and not is_tied:
            expected[path] = weight
        else:
            record = quantize(weight.detach(), OUTPUT_SCHEME if is_output else scheme)
            expected[path] = record.dequantized()
    return expected


@pytest.mark.parametrize(
    "kernels",
    [None, RowKernels(), pytest.param(NativeKernels(), marks=needs_compiler)],
    ids=["torch", "rows", "native"],
)
@pytest.mark.parametrize("scheme", [*WEIGHT_SCHEMES, "bfloat16"])
def test_a_scheme_rounds_every_matrix_and_runs_as_the_rounded_weights(checkpoint, scheme, kernels):
    model = load(checkpoint, quantization=scheme, kernels=kernels)
    expected = expected_weights(checkpoint, scheme)
    actual = weights(model)
    assert actual.keys() == expected.keys()
    for path, weight in actual.items():
        assert torch.equal(weight, expected[path]), path
    reference = load(checkpoint)
    assert not torch.equal(weights(reference)["embed_tokens"][:, :4], torch.zeros(260, 4))
    set_weights(reference, expected)
    ids = prompt(32)
    error = relative_error(decoder_logits(model, ids), decoder_logits(reference, ids))
    assert error <= 1e-5


def set_weights(model: Decoder, values: dict[str, Tensor]) -> None:
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            module.weight.copy_(values[path])
    model.embed_tokens.weight.copy_(values["embed_tokens"])


@needs_compiler
@pytest.mark.parametrize(("scheme", "weight_scheme"), [("w8a8", "int8"), ("w4a8", "int4")])
def test_schemes_that_round_activations_have_the_weights_of_those_that_do_not(
    checkpoint, scheme, weight_scheme
):
    model, exact = (
        load(checkpoint, quantization=each, kernels=NativeKernels())
        for each in (scheme, weight_scheme)
    )
    for path, weight in weights(exact).items():
        assert torch.equal(weights(model)[path], weight), path
    ids = prompt(32)
    error = relative_error(decoder_logits(model, ids), decoder_logits(exact, ids))
    assert 0.0 < error < 0.3
    assert scheme in storage_formats(model)
    assert OUTPUT_SCHEME in storage_formats(model)


@pytest.mark.parametrize("kernels", [TorchKernels(), RowKernels()], ids=lambda k: k.name)
@pytest.mark.parametrize("scheme", ACTIVATION_SCHEMES)
def test_without_kernels_schemes_that_round_activations_are_refused(checkpoint, scheme, kernels):
    with pytest.raises(ConfigError, match=f"quantization={scheme} .* C\\+\\+ compiler"):
        load(checkpoint, quantization=scheme, kernels=kernels)


def test_that_quantised_weights_are_kept_as_floats_is_logged(checkpoint, caplog):
    with caplog.at_level("INFO", logger="nano"):
        load(checkpoint, quantization="int8")
    assert "kept as the floats they stand for" in caplog.text


def test_norms_and_biases_keep_their_precision(checkpoint):
    model, floats = load(checkpoint, quantization="bfloat16"), load(checkpoint)
    num_compared = 0
    for (name, parameter), other in zip(model.named_parameters(), floats.parameters()):
        if parameter.ndim == 1:
            assert torch.equal(parameter, other), name
            assert not torch.equal(parameter, parameter.bfloat16().float()), name
            num_compared += 1
    assert num_compared == 7  # two layers with two norms and a qkv bias; the last norm


@needs_compiler
def test_memory_shrinks_with_the_scheme(tmp_path):
    folder = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=512)
    sizes = []
    for scheme in (None, "bfloat16", "int8", "int4"):
        model = load(folder, quantization=scheme, kernels=NativeKernels())
        packed = [module for module in model.modules() if isinstance(module, PackedWeight)]
        sizes.append(sum(x.nbytes for weight in packed for x in weight.buffers(recurse=False)))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 1.9 * sizes[1] > 1.9 * 1.9 * sizes[2] > 1.9 * 1.9 * 1.5 * sizes[3]


@pytest.mark.parametrize("scheme", WEIGHT_SCHEMES)
def test_weights_that_no_scheme_can_hold_are_named(tmp_path, scheme):
    folder = make_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj: .*NaN"):
        load(folder, quantization=scheme)


def test_dummy_weights_take_every_scheme(checkpoint):
    model = load(checkpoint, quantization="int8", load_format="dummy")
    assert all(weight.isfinite().all() for weight in weights(model).values())


# What the option may say beside what the checkpoint holds.


def resolved(folder: Path, **options: Any) -> str | None:
    return resolve(EngineConfig.from_args({"model": str(folder), **options})).model.quantization


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("folders")
    source = source_checkpoint(root / "float", "llama")
    write_int4(source, root / "awq", INT4 | {"quant_method": "awq"}, awq_tensors)
    write_int4(source, root / "gptq", INT4 | {"quant_method": "gptq"}, gptq_tensors)
    file = write_gguf(source, root / "tiny.gguf", GGMLQuantizationType.Q8_0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        gguf = Path(resolve(EngineConfig.from_args({"model": str(file)})).model.path)
    return {"float": source, "awq": root / "awq", "gptq": root / "gptq", "gguf": gguf}


@pytest.mark.parametrize(
    ("stored", "asked", "result"),
    [
        ("float", None, None),
        ("float", "int8", "int8"),
        ("awq", None, "awq"),
        ("awq", "awq", "awq"),
        ("awq", "bfloat16", "bfloat16"),
        ("awq", "w4a8", "w4a8"),
        ("gptq", None, "gptq"),
        ("gptq", "gptq", "gptq"),
        ("gguf", None, "gguf"),
        ("gguf", "gguf", "gguf"),
        ("gguf", "bfloat16", "bfloat16"),
        ("gguf", "w8a8", "w8a8"),
    ],
)
def test_the_option_defaults_to_what_the_checkpoint_holds(folders, stored, asked, result):
    assert resolved(folders[stored], quantization=asked) == result
    config = resolve(EngineConfig.from_args({"model": str(folders[stored]), "quantization": asked}))
    assert resolve(config).model.quantization == result


@pytest.mark.parametrize(
    ("stored", "asked", "match"),
    [
        ("float", "awq", "quantization=awq, but the weights of .* are floats"),
        ("float", "gguf", "quantization=gguf, but the weights of .* are floats"),
        ("awq", "gptq", "quantization=gptq, but the weights of .* are awq"),
        ("gptq", "awq", "quantization=awq, but the weights of .* are gptq"),
        ("gguf", "awq", "quantization=awq, but the weights of .* are gguf"),
        ("awq", "int8", "quantization=int8 would quantize a second time"),
        ("gptq", "w8a8", "quantization=w8a8 would quantize a second time"),
    ],
)
def test_an_option_that_contradicts_the_checkpoint_is_refused(folders, stored, asked, match):
    with pytest.raises(ConfigError, match=match):
        resolved(folders[stored], quantization=asked)


def test_dummy_weights_of_a_quantised_checkpoint_are_floats(folders, caplog):
    with caplog.at_level("INFO", logger="nano"):
        assert resolved(folders["awq"], load_format="dummy") is None
    assert "makes float weights in place of the checkpoint's awq" in caplog.text


def test_bfloat16_of_a_quantised_checkpoint_is_logged_as_rounding(folders, caplog):
    with caplog.at_level("INFO", logger="nano"):
        resolved(folders["gguf"], quantization="bfloat16")
    assert "rounds" in caplog.text


def test_config_json_of_a_conversion_is_still_one_of_a_decoder(folders):
    config = json.loads((folders["gguf"] / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gguf"
    assert config["model_type"] == "llama"
