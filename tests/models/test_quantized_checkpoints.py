"""AWQ, GPTQ and GGUF checkpoints run as the float model of their dequantised weights does."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from nano import LLM, SamplingParams
from nano.checkpoint import gguf_convert
from nano.checkpoint.gguf_convert import convert_gguf
from nano.checkpoint.quantization_config import GGUF_PACKED_TYPES
from nano.errors import CheckpointError
from nano.layers.linear import Linear
from nano.layers.native_kernels import NativeKernels
from nano.layers.packed_weight import PackedWeight
from nano.models.decoder import Decoder
from nano.models.weights import weight_shapes
from tests.checkpoint.gguf_files import source_checkpoint, write_gguf
from tests.models.int4_files import (
    PROJECTIONS,
    act_order,
    awq_tensors,
    gptq_tensors,
    in_order,
    write_int4,
)
from tests.models.whole_prompt import decoder_logits, hf_logits, load, prompt, relative_error
from tests.tiny import make_checkpoint

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}

needs_compiler = pytest.mark.skipif(not NativeKernels.is_available(), reason="no C++ compiler")
KERNELS = [
    pytest.param(None, id="as floats"),
    pytest.param(NativeKernels(), id="packed", marks=needs_compiler),
]


def matrices(model: Decoder) -> dict[str, torch.Tensor]:
    """Path of each linear layer -> the weight that it multiplies by, [N, K]."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            packed = module.packed
            found[path] = module.weight if packed is None else packed.dequantized()
    return found


def formats(model: Decoder) -> set[str]:
    return {module.format for module in model.modules() if isinstance(module, PackedWeight)}


def assert_runs_as(folder: Path, reference: Path, **how: Any) -> Decoder:
    """The same weights to the last bit, and logits to what float32 sums may differ by."""
    model = load(folder, **how)
    expected = matrices(load(reference))
    for path, weight in matrices(model).items():
        assert torch.equal(weight, expected[path]), path
    ids = prompt(40)
    assert relative_error(decoder_logits(model, ids), hf_logits(reference, ids)) <= 1e-4
    return model


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_awq_runs_as_its_dequantised_weights(tmp_path, family, group_size, kernels):
    source = make_checkpoint(tmp_path / "source", family, hidden_size=128)
    settings = AWQ | {"group_size": group_size}
    reference = write_int4(source, tmp_path / "awq", settings, awq_tensors)
    model = assert_runs_as(tmp_path / "awq", reference, kernels=kernels)
    assert ("int4" in formats(model)) == (kernels is not None)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("groups", [in_order, act_order])
@pytest.mark.parametrize("zeros", ["less_one", "borrowed", "plain"])
@pytest.mark.parametrize("group_size", [32, -1])
def test_gptq_runs_as_its_dequantised_weights(tmp_path, group_size, zeros, groups, kernels):
    source = make_checkpoint(tmp_path / "source")
    settings: dict[str, Any] = {
        **GPTQ,
        "group_size": group_size,
        "desc_act": groups is act_order,
        "checkpoint_format": "gptq_v2" if zeros == "plain" else "gptq",
        "meta": {"quantizer": "gptqmodel:1.4" if zeros == "borrowed" else "autogptq:0.7"},
    }
    reference = write_int4(
        source,
        tmp_path / "gptq",
        settings,
        lambda grid: gptq_tensors(grid, zeros),
        groups=groups,
    )
    assert_runs_as(tmp_path / "gptq", reference, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_symmetric_gptq_runs_as_its_dequantised_weights(tmp_path, kernels):
    source = make_checkpoint(tmp_path / "source", "mistral")
    reference = write_int4(
        source, tmp_path / "gptq", GPTQ | {"sym": True}, gptq_tensors, is_symmetric=True
    )
    assert_runs_as(tmp_path / "gptq", reference, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
def test_projections_of_different_input_orders_are_kept_apart(tmp_path, kernels):
    """Each of q, k and v has its own order: they are one product only if they agree."""
    seeds = itertools.count()
    reference = write_int4(
        make_checkpoint(tmp_path / "source"),
        tmp_path / "gptq",
        GPTQ | {"desc_act": True},
        gptq_tensors,
        groups=lambda num_inputs, size: act_order(num_inputs, size, next(seeds)),
    )
    assert_runs_as(tmp_path / "gptq", reference, kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "modules",
    [(*PROJECTIONS, "lm_head"), ("q_proj", "v_proj", "up_proj"), ("down_proj",)],
    ids=str,
)
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_whatever_has_a_qweight_is_quantised_and_the_rest_is_float(
    tmp_path, method, modules, kernels
):
    source = make_checkpoint(tmp_path / "source", vocab_size=264)
    settings, tensors = (AWQ, awq_tensors) if method == "awq" else (GPTQ, gptq_tensors)
    reference = write_int4(source, tmp_path / "int4", settings, tensors, modules=modules)
    assert_runs_as(tmp_path / "int4", reference, kernels=kernels)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_the_configuration_may_stand_in_a_file_of_its_own(tmp_path, method):
    settings, tensors = (AWQ, awq_tensors) if method == "awq" else (GPTQ, gptq_tensors)
    reference = write_int4(
        make_checkpoint(tmp_path / "source"),
        tmp_path / "int4",
        settings,
        tensors,
        config_file="quantize_config.json",
    )
    assert_runs_as(tmp_path / "int4", reference)


@needs_compiler
@pytest.mark.parametrize(
    ("stored", "scheme", "kind"),
    [("awq", "w4a8", "w4a8"), ("Q4_1", "int4", "int4"), ("Q8_0", "int8", "int8")],
)
def test_matrices_that_have_the_bits_of_a_scheme_are_not_rounded_again(
    tmp_path, stored, scheme, kind
):
    if stored == "awq":
        source = make_checkpoint(tmp_path / "source")
        reference = write_int4(source, tmp_path / "awq", AWQ, awq_tensors)
        folder = tmp_path / "awq"
    else:
        folder, reference = gguf_folders(tmp_path, "llama", stored)
    model = load(folder, quantization=scheme, kernels=NativeKernels())
    expected = matrices(load(reference))
    compared = {path: weight for path, weight in matrices(model).items() if path != "lm_head"}
    assert len(compared) >= 4
    for path, weight in compared.items():
        assert torch.equal(weight, expected[path]), path
    assert kind in formats(model)


def test_a_tied_model_ignores_a_stray_quantised_lm_head(tmp_path):
    source = make_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    reference = write_int4(source, tmp_path / "awq", AWQ, awq_tensors)
    edit(
        tmp_path / "awq", {f"lm_head.{part}": torch.zeros(1) for part in ("qweight", "scales")}, ()
    )
    assert_runs_as(tmp_path / "awq", reference)


def edit(folder: Path, added: dict[str, torch.Tensor], removed: tuple[str, ...]) -> None:
    tensors = load_file(folder / "model.safetensors") | added
    for name in removed:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


MODULE = "model.layers.1.self_attn.k_proj"


@pytest.fixture
def gptq_folder(tmp_path) -> Path:
    write_int4(make_checkpoint(tmp_path / "source"), tmp_path / "gptq", GPTQ, gptq_tensors)
    return tmp_path / "gptq"


def test_biases_of_zeros_that_the_model_has_no_place_for_are_ignored(gptq_folder):
    ids = prompt(20)
    before = decoder_logits(load(gptq_folder), ids)
    edit(gptq_folder, {f"{MODULE}.bias": torch.zeros(32)}, ())
    assert torch.equal(decoder_logits(load(gptq_folder), ids), before)


def test_other_biases_that_the_model_has_no_place_for_are_refused(gptq_folder):
    edit(gptq_folder, {f"{MODULE}.bias": torch.ones(32)}, ())
    with pytest.raises(CheckpointError, match=rf"holds {MODULE}\.bias, for which"):
        load(gptq_folder)


@pytest.mark.parametrize("part", ["scales", "qzeros"])
def test_an_absent_part_is_named_with_file_and_module(gptq_folder, part):
    edit(gptq_folder, {}, (f"{MODULE}.{part}",))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {MODULE}: {part} is absent"):
        load(gptq_folder)


def test_a_part_of_another_shape_is_named_with_file_and_module(gptq_folder):
    edit(gptq_folder, {f"{MODULE}.scales": torch.ones(4, 32)}, ())
    with pytest.raises(CheckpointError, match=rf"{MODULE}: scales has shape \(4, 32\), expected"):
        load(gptq_folder)


def test_a_quantised_tensor_without_a_configuration_is_no_weight(gptq_folder):
    config = json.loads((gptq_folder / "config.json").read_text())
    del config["quantization_config"]
    (gptq_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.0\.self_attn\.q_proj\.weight"):
        load(gptq_folder)


# GGUF.

WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


def gguf_folders(tmp_path: Path, family: str, qtype: str, **kwargs: Any) -> tuple[Path, Path]:
    """The conversion of a GGUF file, and one that keeps no type packed."""
    overrides = kwargs.pop("overrides", {})
    source = source_checkpoint(tmp_path / "source", family, **(WHOLE_BLOCKS | overrides))
    file = write_gguf(source, tmp_path / "tiny.gguf", GGMLQuantizationType[qtype], **kwargs)
    folders = tmp_path / "packed", tmp_path / "floats"
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            folder.mkdir()
            convert_gguf(file, folder)
            patch.setattr(gguf_convert, "GGUF_PACKED_TYPES", ())
    assert "quantization_config" in json.loads((folders[0] / "config.json").read_text())
    assert "quantization_config" not in json.loads((folders[1] / "config.json").read_text())
    return folders


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("qtype", GGUF_PACKED_TYPES)
def test_packed_gguf_weights_give_the_bits_of_the_dequantised_ones(
    tmp_path, qtype, is_tied, kernels
):
    packed, floats = gguf_folders(
        tmp_path, "llama", qtype, overrides={"tie_word_embeddings": is_tied}
    )
    model, reference = load(packed, kernels=kernels), load(floats, kernels=kernels)
    ids = prompt(24)
    assert torch.equal(decoder_logits(model, ids), decoder_logits(reference, ids))
    assert relative_error(decoder_logits(model, ids), hf_logits(floats, ids)) <= 1e-4
    if kernels is not None:
        kind = "int4" if qtype.startswith("Q4") else "int8"
        assert formats(model) == {kind}


@needs_compiler
def test_projections_of_different_types_give_the_bits_of_the_dequantised_ones(tmp_path):
    """As in real files, where v_proj and down_proj have more bits than the others."""
    others = {"v_proj": "Q6_K", "down_proj": "Q8_0", "up_proj": "F32", "k_proj": "Q5_1"}
    packed, floats = gguf_folders(
        tmp_path,
        "qwen2",
        "Q4_K",
        other_types={name: GGMLQuantizationType[kind] for name, kind in others.items()},
    )
    model, reference = (load(folder, kernels=NativeKernels()) for folder in (packed, floats))
    ids = prompt(24)
    assert torch.equal(decoder_logits(model, ids), decoder_logits(reference, ids))
    assert {"int4", "int8", "float32"} <= formats(model)


@needs_compiler
def test_a_packed_model_takes_the_memory_of_its_blocks(tmp_path):
    packed, floats = gguf_folders(tmp_path, "llama", "Q4_0", overrides={"hidden_size": 512})
    sizes = []
    for folder in (packed, floats):
        model = load(folder, kernels=NativeKernels())
        sizes.append(sum(x.nbytes for x in (*model.parameters(), *model.buffers())))
    assert sizes[0] < sizes[1] / 5


def test_the_engine_generates_the_same_from_packed_weights(tmp_path):
    """Tokens and logprobs to the last bit, prompts in chunks and several requests at once."""
    packed, floats = gguf_folders(
        tmp_path,
        "qwen2",
        "Q4_1",
        other_types={"v_proj": GGMLQuantizationType.Q8_0},
        overrides={"tie_word_embeddings": True},
    )
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=8, logprobs=2, ignore_eos=True)
    results = []
    for folder, budget in ((packed, 16), (floats, 256)):
        with LLM(folder, max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
            outputs = llm.generate(["a first prompt, of some length", "b"], params, use_tqdm=False)
        results.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert results[0] == results[1]


def test_a_block_tensor_of_another_shape_is_refused(tmp_path):
    packed, _ = gguf_folders(tmp_path, "llama", "Q4_0")
    name = "model.layers.0.mlp.up_proj.weight"
    edit(packed, {name: torch.zeros(256, 126, dtype=torch.uint8)}, ())
    with pytest.raises(CheckpointError, match=rf"{name} is torch.uint8 .*which is no Q4_0 of"):
        load(packed)


def test_weight_shapes_name_everything_a_checkpoint_holds(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    shapes = weight_shapes(load(folder))
    expected = load_file(folder / "model.safetensors")
    assert shapes == {name: tuple(x.shape) for name, x in expected.items()}
    assert np.prod(shapes["lm_head.weight"]) > 0
