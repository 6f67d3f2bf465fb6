"""build_kernels: our C++ compiled while Python is still importing torch. Torch-free."""

import threading
from pathlib import Path

from nano.config import EngineConfig
from nano.native.build import build_all

_NANO = Path(__file__).parent.parent


def build_kernels(config: EngineConfig) -> threading.Thread:
    """Begin to compile what a worker for `config` will load, where the cache does not have it."""
    folders = ["attention", "layers", "sampling"]
    if config.model.quantization is not None:
        folders.append("quant")
    sources = [file for folder in folders for file in sorted((_NANO / folder).glob("*.cpp"))]
    thread = threading.Thread(target=build_all, args=(sources,), daemon=True)
    thread.start()
    return thread
