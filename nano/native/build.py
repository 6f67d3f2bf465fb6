"""Compiles our C++ files on first use and loads them with ctypes.

Plain `extern "C"` files without torch headers take two seconds; the result is cached under a key of
everything it depends on: sources, flags, compiler, CPU. Import torch first: then both use the one
OpenMP runtime that torch brought.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from nano.log import get_logger

logger = get_logger(__name__)

_HEADERS = Path(__file__).parent
# No -ffast-math: it would let the compiler change the order of sums.
_FLAGS = ("-O3", "-std=c++20", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-Wall")


@cache
def load_library(source: Path) -> ctypes.CDLL | None:
    """The compiled `source`, built now unless it is in the cache; None without a compiler.

    Why there is none is logged once per file. Two processes may build at once: each writes a file
    of its own and renames it into place.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    if compiler is None:
        logger.warning("%s: no C++ compiler found; torch's own kernels are used", source.name)
        return None
    command = [compiler, *_FLAGS, _cpu_flag(), f"-I{_HEADERS}", str(source)]
    library = _cache_folder() / f"{source.stem}-{_key(command, source)}.so"
    if not library.exists() and not _build(command, library):
        return None
    return ctypes.CDLL(str(library))


def _build(command: list[str], library: Path) -> bool:
    library.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True)
        if done.returncode != 0:
            logger.warning(
                "%s does not compile; torch's own kernels are used:\n%s",
                command[-1],
                done.stderr[-2000:],
            )
            return False
        os.replace(unfinished, library)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    logger.info("compiled %s", library.name)
    return True


def _cpu_flag() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _key(command: list[str], source: Path) -> str:
    digest = hashlib.sha256(" ".join(command).encode())
    for path in [source, *sorted(_HEADERS.glob("*.h"))]:
        digest.update(path.read_bytes())
    digest.update(_compiler_version(command[0]).encode())
    digest.update(_cpu_name().encode())
    return digest.hexdigest()[:16]


@cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


@cache
def _cpu_name() -> str:
    """Model and instruction sets: what -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "nano" / "native"
