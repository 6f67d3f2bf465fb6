"""Compiling on first use: once, under a key of all it depends on, and never fatally."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nano.native import build
from nano.native.build import build_all, compiler

NANO = Path(build.__file__).parent.parent
ANSWER = 'extern "C" int answer() { return %d; }\n'

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build._built.cache_clear()
    yield tmp_path / "cache/nano/native"
    build._built.cache_clear()


def write(tmp_path: Path, number: int) -> Path:
    source = tmp_path / "answer.cpp"
    source.write_text(ANSWER % number)
    return source


def load(source: Path):
    build._built.cache_clear()  # as another process would
    return build._loaded(source, build.cpu_flags())


@needs_compiler
def test_a_source_is_compiled_once_and_again_when_it_changes(tmp_path, cache, monkeypatch):
    assert load(write(tmp_path, 41)).answer() == 41
    assert len(list(cache.iterdir())) == 1
    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", lambda *_: pytest.fail("it was compiled again"))
        assert load(write(tmp_path, 41)).answer() == 41
    assert load(write(tmp_path, 42)).answer() == 42
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_a_header_beside_the_source_and_other_flags_give_another_library(
    tmp_path, cache, monkeypatch
):
    source = tmp_path / "answer.cpp"
    source.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    (tmp_path / "number.h").write_text("#ifndef NUMBER\n#define NUMBER 1\n#endif\n")
    assert load(source).answer() == 1
    (tmp_path / "number.h").write_text("#ifndef NUMBER\n#define NUMBER 2\n#endif\n")
    assert load(source).answer() == 2
    monkeypatch.setenv("NANO_CPU_FLAGS", "-DNUMBER=3")
    assert load(source).answer() == 3
    assert len(list(cache.iterdir())) == 3


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
def test_with_a_filled_cache_no_compiler_is_needed(tmp_path, cache, monkeypatch):
    source = write(tmp_path, 5)
    build_all([source])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load(source).answer() == 5


@needs_compiler
def test_a_damaged_library_is_compiled_again(tmp_path, cache, caplog):
    source = write(tmp_path, 6)
    build_all([source])
    (library,) = cache.glob("answer-*.so")
    library.write_bytes(library.read_bytes()[:100])
    with caplog.at_level("WARNING", logger="nano"):
        assert load(source).answer() == 6
    assert "is compiled again" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build, "compiler", lambda: shutil.which("true"))
    with caplog.at_level("WARNING", logger="nano"):
        assert load(write(tmp_path, 8)) is None
    build._built.cache_clear()
    assert "torch's own kernels are used" in caplog.text


@needs_compiler
def test_processes_that_compile_at_once_do_not_disturb_one_another(tmp_path, cache):
    source = write(tmp_path, 7)
    program = (
        "import sys; from pathlib import Path; from nano.native import build; "
        "print(build._loaded(Path(sys.argv[1]), build.cpu_flags()).answer())"
    )

    def run(_: int) -> str:
        command = [sys.executable, "-c", program, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == ["7"] * 4
    assert len(list(cache.iterdir())) == 1


@needs_compiler
def test_threads_that_need_one_library_compile_it_once(tmp_path, cache, monkeypatch):
    source = write(tmp_path, 9)
    compiled = []
    compile_for_real = build._compile
    monkeypatch.setattr(
        build, "_compile", lambda *args: compiled.append(1) or compile_for_real(*args)
    )
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build._built(source, build.cpu_flags()), range(4)))
    assert found == [found[0]] * 4
    assert compiled == [1]


@needs_compiler
@pytest.mark.parametrize("source", sorted(NANO.rglob("*_*.cpp")), ids=lambda source: source.stem)
def test_every_kernel_compiles_and_loads(source):
    """Or all tests of kernels would be skipped, as if there were no compiler."""
    assert build.load_ops(source)
