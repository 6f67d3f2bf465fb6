"""Compiles our C++ files on first use and loads them: as torch ops, or with ctypes.

Ops are registered through torch's stable C interface (`op.h`), which a call crosses in a
microsecond where Python with ctypes takes ten, and without torch's headers: even those of its
stable interface take most of a second to compile, and ATen's fourteen. What is built is cached
under a key of all it depends on: sources, flags, CPU, torch. With the cache filled no compiler is
needed.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from nano.log import get_logger

logger = get_logger(__name__)

_HEADERS = Path(__file__).parent
_THREADS = _HEADERS / "threads.cpp"
# No -ffast-math: it would let the compiler change the order of sums. Fused multiply-adds are asked
# for, so that every copy of a loop has them. C++17: the standard headers of C++20 take longer.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fno-math-errno", "-ffp-contract=fast", "-Wall")


def load_ops(source: Path) -> bool:
    """Register the torch ops of `source`, compiled now unless it is in the cache.

    False without a compiler or if it does not compile; why is logged once per file.
    """
    return _load_ops(source, cpu_flags())


@cache
def load_threads() -> ctypes.CDLL | None:
    """The thread pool that every kernel calls; None if it cannot be built."""
    pool = _loaded(_THREADS, cpu_flags(), ctypes.RTLD_GLOBAL)  # kernels find its symbols
    if pool is None:
        return None
    pool.nano_set_num_threads.argtypes = [ctypes.c_int]
    pool.nano_set_num_threads.restype = None
    pool.nano_num_threads.restype = ctypes.c_int
    return pool


def build_all(sources: Iterable[Path]) -> None:
    """Compile what is not in the cache yet, side by side. Needs no torch: call it early."""
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda source: _built(source, cpu_flags()), [_THREADS, *sources]):
            pass


def compiler() -> str | None:
    """The C++ compiler: $CXX, g++ or c++. None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def cpu_flags() -> tuple[str, ...]:
    """Which instruction set to compile for: this CPU's, or what NANO_CPU_FLAGS says instead."""
    told = os.environ.get("NANO_CPU_FLAGS")
    if told is not None:
        return tuple(shlex.split(told))
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return ("-march=native" if is_x86 else "-mcpu=native",)


@cache
def cpu_name() -> str:
    """Model and instruction sets: what -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def multiplies_bfloat16() -> bool:
    """Whether this CPU has units for it: AVX512_BF16."""
    return "avx512_bf16" in cpu_name().split()


@cache
def _load_ops(source: Path, flags: tuple[str, ...]) -> bool:
    import_module("torch")  # only here: building needs none, but ops are registered with it
    return load_threads() is not None and _loaded(source, flags) is not None


def _loaded(
    source: Path, flags: tuple[str, ...], mode: int = ctypes.DEFAULT_MODE
) -> ctypes.CDLL | None:
    library = _built(source, flags)
    if library is None:
        return None
    try:
        return ctypes.CDLL(str(library), mode)
    except OSError as error:  # a full disk may have lost the end of it
        logger.warning("%s is compiled again: %s", library.name, error)
    library.unlink(missing_ok=True)
    _built.cache_clear()
    library = _built(source, flags)
    return None if library is None else ctypes.CDLL(str(library), mode)


@cache
def _built(source: Path, flags: tuple[str, ...]) -> Path | None:
    """The library compiled from `source`: from the cache, or now."""
    library = _cache_folder() / f"{source.stem}-{_key(source, flags)}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _turn(library):
            return library if library.exists() else _build(source, flags, library)
    except OSError as error:
        logger.warning("%s: %s; torch's own kernels are used", source.name, error)
        return None


@contextmanager
def _turn(library: Path) -> Iterator[None]:
    """Who builds the same library meanwhile, in another thread or process, is waited for."""
    path = library.with_suffix(".lock")
    with path.open("w") as file:
        with suppress(OSError):  # a file system without locks: both build, and the last one stays
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _build(source: Path, flags: tuple[str, ...], library: Path) -> Path | None:
    found = compiler()
    if found is None:
        logger.warning("%s: no C++ compiler found; torch's own kernels are used", source.name)
        return None
    # -iquote, not -I: <math.h> must stay the system's.
    ours = (f"-iquote{_HEADERS}", f"-iquote{_HEADERS.parent}")
    torch_library = (f"-L{_torch_folder() / 'lib'}", "-ltorch_cpu")  # the ops' interface
    done = _compile([found, *_FLAGS, *flags, *ours, str(source), *torch_library], library)
    return library if done else None


def _compile(command: list[str], library: Path) -> bool:
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", unfinished], capture_output=True, text=True)
        if done.returncode != 0:
            logger.warning(
                "%s does not compile; torch's own kernels are used:\n%s",
                library.stem,
                done.stderr[-2000:],
            )
            return False
        os.replace(unfinished, library)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    logger.info("compiled %s", library.name)
    return True


def _key(source: Path, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(" ".join((*_FLAGS, *flags)).encode())
    headers = {*_HEADERS.parent.rglob("*.h"), *source.parent.glob("*.h")}
    for path in [source, *sorted(headers)]:
        digest.update(path.read_bytes())
    digest.update(version("torch").encode())
    digest.update(cpu_name().encode())
    return digest.hexdigest()[:16]


def _torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "nano" / "native"
