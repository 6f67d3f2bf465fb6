"""One tiny model, compiled once for the whole session by the program that a user would run."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nano.native import build
from tests.tiny import make_checkpoint

ENGINE_ARGS = {"max_model_len": 128, "max_num_batched_tokens": 128}


@dataclass(frozen=True)
class Compiled:
    """A checkpoint, and a cache folder that holds its pieces and our kernels."""

    checkpoint: Path
    cache: Path
    output: str  # of `python -m nano.compile --explain`

    @property
    def artifacts(self) -> list[Path]:
        return artifacts(self.cache)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("compiled")
    checkpoint = make_checkpoint(folder / "tiny", num_hidden_layers=3)
    cache = folder / "cache"
    share_kernels(cache)
    command = [sys.executable, "-m", "nano.compile", "--model", str(checkpoint), "--explain"]
    for name, value in ENGINE_ARGS.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    # B110: a folder for the compiler's own files that nobody can write to.
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_CACHE_DIR": "/proc/x"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return Compiled(checkpoint, cache, done.stdout)


@pytest.fixture
def own_cache(compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the compiled pieces as this test's cache folder, to spoil at will."""
    cache = tmp_path / "cache"
    share_kernels(cache)
    shutil.copytree(compiled.cache / "nano" / "compiled", cache / "nano" / "compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache


def share_kernels(cache: Path) -> None:
    """Our kernels need not be compiled once more for another cache folder."""
    (cache / "nano").mkdir(parents=True)
    (cache / "nano" / "native").symlink_to(build._cache_folder())


def artifacts(cache: Path) -> list[Path]:
    """The complete ones."""
    return [path.parent for path in sorted((cache / "nano" / "compiled").glob("*/manifest.json"))]
