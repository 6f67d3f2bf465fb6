"""Compiling on first use: once, under a key of all it depends on, and never fatally."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nano.native import build

ANSWER = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.load_library.cache_clear()
    yield tmp_path / "cache/nano/native"
    build.load_library.cache_clear()


def write(tmp_path: Path, number: int) -> Path:
    source = tmp_path / "answer.cpp"
    source.write_text(ANSWER % number)
    return source


def load(source: Path):
    build.load_library.cache_clear()  # as another process would
    return build.load_library(source)


needs_compiler = pytest.mark.skipif(
    subprocess.run(["which", "g++"], capture_output=True).returncode != 0,
    reason="needs a C++ compiler",
)


@needs_compiler
def test_a_source_is_compiled_once_and_again_when_it_changes(tmp_path, cache, monkeypatch):
    assert load(write(tmp_path, 41)).answer() == 41
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("it was compiled again"))
    assert load(write(tmp_path, 41)).answer() == 41
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    assert load(write(tmp_path, 42)).answer() == 42
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_a_source_that_does_not_compile_is_logged_and_leaves_nothing(tmp_path, cache, caplog):
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    with caplog.at_level("WARNING", logger="nano"):
        assert load(source) is None
    assert "does not compile" in caplog.text
    assert list(cache.iterdir()) == []


def test_without_a_compiler_there_is_no_library_and_the_log_says_so(
    tmp_path, cache, monkeypatch, caplog
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level("WARNING", logger="nano"):
        assert load(write(tmp_path, 1)) is None
    assert "no C++ compiler found" in caplog.text


@needs_compiler
def test_processes_that_compile_at_once_do_not_disturb_one_another(tmp_path, cache):
    source = write(tmp_path, 7)
    program = (
        "import sys; from pathlib import Path; from nano.native.build import load_library; "
        "print(load_library(Path(sys.argv[1])).answer())"
    )

    def run(_: int) -> str:
        command = [sys.executable, "-c", program, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == ["7"] * 4
    assert len(list(cache.iterdir())) == 1
