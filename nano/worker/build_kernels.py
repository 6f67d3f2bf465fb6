"""build_kernels: our C++ compiled while Python is still importing torch. Torch-free."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nano.config import EngineConfig
from nano.native.build import build_all

_NANO = Path(__file__).parent.parent
_FOLDERS = ("layers", "attention", "sampling")  # in the order in which a worker asks
# What a quantisation asks for besides: its own format, and that of its output layer.
_FORMATS = {
    "int8": ("int8",),
    "w8a8": ("w8a8", "int8"),
    "int4": ("int4", "int8"),
    "w4a8": ("w4a8", "int4", "int8"),
    "awq": ("int4",),
    "gptq": ("int4",),
    "gguf": ("int4", "int8"),
}


def build_kernels(config: EngineConfig) -> threading.Thread:
    """Begin to compile what a worker for `config` will load, where the cache does not have it.

    Nobody need wait for the thread: whoever loads a library waits for its own compilation.
    """
    formats = _FORMATS.get(config.model.quantization or "", ())
    sources = [_NANO / "quant" / f"{name}_linear.cpp" for name in formats]
    sources += [file for folder in _FOLDERS for file in sorted((_NANO / folder).glob("*.cpp"))]
    thread = threading.Thread(target=_build, args=(sources,), name="build-kernels", daemon=True)
    thread.start()
    return thread


def _build(sources: list[Path]) -> None:
    """As many at once as there are cores: more would only make the first ones wait."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda source: build_all([source]), sources):
            pass
