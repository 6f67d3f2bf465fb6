"""A fingerprint follows the weights: through a copy, and away at the smallest change."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from nano.checkpoint.fingerprint import weights_fingerprint
from tests.tiny import make_checkpoint


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "m")


def test_a_copy_keeps_it(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    assert weights_fingerprint(tmp_path / "copy") == weights_fingerprint(folder)


def test_a_change_of_any_one_tensor_changes_it(folder):
    weights = load_file(folder / "model.safetensors")
    seen = {weights_fingerprint(folder)}
    for name in weights:
        save_file(weights | {name: weights[name] * 1.01}, folder / "model.safetensors")
        seen.add(weights_fingerprint(folder))
    assert len(seen) == 1 + len(weights)


def test_a_change_of_config_changes_it(folder):
    before = weights_fingerprint(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert weights_fingerprint(folder) != before
