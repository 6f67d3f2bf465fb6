"""The folder of artifacts: complete or not there, whatever happens to those who build."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nano.compile.store import MANIFEST, ArtifactStore


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "compiled")


def build(store: ArtifactStore, key: str = "k", factors: str = "{}") -> bool:
    """Whether it was this call that built it."""
    with store.building(key) as folder:
        if folder is None:
            return False
        (folder / MANIFEST).write_text(f'{{"factors": {factors}}}')
    return True


def names(store: ArtifactStore) -> set[str]:
    return {path.name for path in store.root.iterdir() if path.suffix != ".lock"}


def test_what_is_built_is_found_under_its_key_only(store):
    assert store.find("k") is None
    assert build(store)
    assert store.find("k") == store.root / "k"
    assert store.find("other") is None
    assert not build(store)


def test_an_error_leaves_nothing(store):
    with pytest.raises(FileNotFoundError), store.building("k") as folder:
        (folder / MANIFEST).rename(folder / "nowhere")
    assert names(store) == set()


def test_of_builders_at_once_one_builds_and_the_others_wait_for_it(store):
    begun, built = threading.Barrier(4), []

    def builder() -> None:
        begun.wait()
        built.append(build(store))

    threads = [threading.Thread(target=builder) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(built) == [False, False, False, True]
    assert names(store) == {"k"}


def test_a_killed_builder_leaves_neither_a_lock_nor_an_artifact(store):  # B108
    program = (
        "import sys, pathlib, signal, os\n"
        "from nano.compile.store import ArtifactStore\n"
        "with ArtifactStore(pathlib.Path(sys.argv[1])).building('k') as folder:\n"
        "    (folder / 'pieces.py').write_text('half')\n"
        "    print(folder.name, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(store.root)], capture_output=True, text=True
    )
    assert done.returncode == -9
    left = done.stdout.strip()
    assert names(store) == {left}
    assert store.find("k") is None
    assert build(store, "another")  # and sweeps
    assert names(store) == {"another"}
    assert build(store)


def test_an_unfinished_folder_of_a_living_builder_is_left_alone(store):
    with store.building("k") as folder:
        assert build(store, "another")
        assert folder.exists()
        (folder / MANIFEST).write_text("{}")
    assert store.find("k") is not None


def test_what_is_put_aside_is_kept_and_makes_room(store):
    build(store)
    store.quarantine("k")
    assert names(store) == {"k.bad"}
    assert build(store)
    store.quarantine("k")
    store.quarantine("k")  # another process was faster
    assert names(store) == {"k.bad"}


def test_the_nearest_artifact_explains_a_miss(store):
    assert store.nearest({"torch": "2"}) is None
    build(store, "a", '{"torch": "1", "layers": "30", "dtype": "float32"}')
    build(store, "b", '{"torch": "2", "layers": "30", "dtype": "float32"}')
    build(store, "c", "null")
    wanted = {"torch": "2", "layers": "12", "dtype": "float32", "heads": "3"}
    assert store.nearest(wanted) == {"layers": ("30", "12"), "heads": ("none", "3")}
    store.quarantine("b")
    assert "torch" in store.nearest(wanted)


def test_a_place_that_cannot_be_written_to_says_so_and_finds_nothing(tmp_path):  # B108
    (tmp_path / "file").write_text("in the way")
    store = ArtifactStore(tmp_path / "file" / "compiled")
    assert "cannot be written to" in store.unwritable_reason()
    assert store.find("k") is None
    assert store.nearest({}) is None
    assert ArtifactStore(tmp_path / "good").unwritable_reason() is None


def test_the_store_is_in_the_users_cache_and_needs_no_home(tmp_path, monkeypatch):  # B108
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ArtifactStore.default().root == tmp_path / "nano" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ArtifactStore.default().root == tmp_path / "home" / ".cache" / "nano" / "compiled"

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    assert ArtifactStore.default() is None


def test_others_cannot_read_or_write_what_will_be_run(store):
    build(store)
    assert os.stat(store.root).st_mode & 0o777 == 0o700
