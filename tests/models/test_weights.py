"""Loading: every tensor in its place, or an error that names what is wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nano.checkpoint.hf_config import load_decoder_config
from nano.errors import CheckpointError
from nano.models.weights import load_model
from tests.models.whole_prompt import decoder_logits, hf_logits, load, prompt, relative_error
from tests.tiny import make_checkpoint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def edit_weights(folder: Path, edit, file: str = WEIGHTS) -> None:
    tensors = load_file(folder / file)
    edit(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def edit_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= values
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def error_of(folder: Path, num_tokens: int = 24) -> float:
    ids = prompt(num_tokens)
    return relative_error(decoder_logits(load(folder), ids), hf_logits(folder, ids))


def sharded(folder: Path) -> Path:
    make_checkpoint(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 3
    return folder


# B112: output weights, tied or not.


def test_a_tied_checkpoint_without_lm_head_uses_its_embedding(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    assert error_of(folder) <= 1e-4


def test_a_stray_lm_head_in_a_tied_checkpoint_is_ignored(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    ids = prompt(24)
    before = hf_logits(folder, ids)
    edit_weights(folder, lambda t: t.update({"lm_head.weight": torch.randn(260, 64)}))
    assert relative_error(decoder_logits(load(folder), ids), before) <= 1e-4


def test_an_untied_checkpoint_uses_its_own_lm_head(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=False)
    tensors = load_file(folder / WEIGHTS)
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert error_of(folder) <= 1e-4


def test_an_absent_tie_key_means_untied(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=False)
    edit_config(folder, tie_word_embeddings=...)
    assert "tie_word_embeddings" not in (folder / "config.json").read_text()
    assert error_of(folder) <= 1e-4


def test_an_untied_checkpoint_without_lm_head_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path)
    edit_weights(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        load(folder)


# B114: shards.


def test_shards_are_loaded_by_their_index(tmp_path):
    assert error_of(sharded(tmp_path)) <= 1e-4


def test_a_missing_shard_is_named(tmp_path):
    shard = sorted(sharded(tmp_path).glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_shard_is_named(tmp_path, kept):
    shard = sorted(sharded(tmp_path).glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=shard.name):
        load(tmp_path)


def test_a_shard_without_a_tensor_of_the_index_is_named(tmp_path):
    folder = sharded(tmp_path)
    name, shard = next(iter(json.loads((folder / INDEX).read_text())["weight_map"].items()))
    edit_weights(folder, lambda tensors: tensors.pop(name), shard)
    with pytest.raises(CheckpointError, match=f"{shard} lacks {name}"):
        load(folder)


def test_stray_files_beside_an_index_are_ignored(tmp_path):
    folder = sharded(tmp_path)
    ids = prompt(24)
    before = hf_logits(folder, ids)
    shard = next(folder.glob("model-*.safetensors"))
    wrong = {name: torch.zeros_like(tensor) for name, tensor in load_file(shard).items()}
    for name in ("consolidated.safetensors", "model-old.safetensors", WEIGHTS):
        save_file(wrong, folder / name)
    assert relative_error(decoder_logits(load(folder), ids), before) <= 1e-4


def test_model_safetensors_alone_counts_when_there_is_no_index(tmp_path):
    folder = make_checkpoint(tmp_path)
    ids = prompt(24)
    before = hf_logits(folder, ids)
    wrong = {n: torch.zeros_like(t) for n, t in load_file(folder / WEIGHTS).items()}
    save_file(wrong, folder / "consolidated.safetensors")
    assert relative_error(decoder_logits(load(folder), ids), before) <= 1e-4


def test_shards_without_an_index_are_joined(tmp_path):
    folder = sharded(tmp_path)
    ids = prompt(24)
    before = hf_logits(folder, ids)
    (folder / INDEX).unlink()
    assert relative_error(decoder_logits(load(folder), ids), before) <= 1e-4


def test_a_name_in_two_files_is_refused_when_there_is_no_index(tmp_path):
    folder = sharded(tmp_path)
    (folder / INDEX).unlink()
    shard = next(folder.glob("model-*.safetensors"))
    save_file(load_file(shard), folder / "model-old.safetensors")
    with pytest.raises(CheckpointError, match=r"is in both .*model-old\.safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "weight_map"),
        ("[]", "weight_map"),
        ('{"weight_map": 3}', "weight_map"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "not beside it"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, text, match):
    folder = sharded(tmp_path)
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=match):
        load(folder)


# Names, shapes and dtypes.


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        load(folder)


def test_missing_tensors_are_named_and_counted(tmp_path):
    folder = make_checkpoint(tmp_path)

    def drop_layer(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            del tensors[name]

    edit_weights(folder, drop_layer)
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\..* and 6 more"):
        load(folder)


def test_an_unexpected_tensor_is_named_with_its_file(tmp_path):
    folder = make_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.q_proj.bias"
    edit_weights(folder, lambda t: t.update({name: torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=f"{WEIGHTS} holds {name}"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path):
    folder = make_checkpoint(tmp_path)
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_weights(folder, lambda t: t.update({name: torch.zeros(64, 32)}))
    with pytest.raises(CheckpointError, match=rf"{name} .*\(64, 32\), expected \(32, 64\)"):
        load(folder)


def test_integer_weights_are_refused(tmp_path):
    folder = make_checkpoint(tmp_path)
    edit_weights(
        folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is torch\.int8"):
        load(folder)


def test_rotary_buffers_of_old_exporters_are_ignored(tmp_path):
    folder = make_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda t: t.update({name: torch.full((8,), 9.0)}))
    assert error_of(folder) <= 1e-4


def test_bfloat16_weights_widen_exactly(tmp_path):
    folder = make_checkpoint(tmp_path)
    edit_weights(folder, lambda t: t.update({n: x.bfloat16() for n, x in t.items()}))
    stored = load_file(folder / WEIGHTS)["model.layers.1.self_attn.v_proj.weight"]
    qkv = load(folder).layers[1].self_attn.qkv_proj
    loaded = qkv.weight[qkv.shards["v_proj"]]
    assert stored.dtype == torch.bfloat16
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, stored.float())


def dummy(folder: Path, dtype: torch.dtype):
    return load_model(
        folder,
        load_decoder_config(folder),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=64,
        load_format="dummy",
    )


def test_dummy_weights_need_no_file_and_are_the_same_every_time(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen2")
    (folder / WEIGHTS).unlink()
    first, second = dummy(folder, torch.float32), dummy(folder, torch.float32)
    for (name, a), b in zip(first.named_parameters(), second.parameters()):
        assert torch.equal(a, b), name
        assert a.isfinite().all(), name
        assert a.std() > 0.0 or name.endswith("norm.weight"), name
    logits = decoder_logits(first, prompt(8))
    wide = decoder_logits(dummy(folder, torch.float64), prompt(8))
    assert relative_error(logits, wide.float()) <= 1e-4
