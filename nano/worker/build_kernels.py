"""build_kernels: our C++ compiled while Python is still importing torch. Torch-free."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nano.config import EngineConfig
from nano.native.build import build_all, multiplies_bfloat16

_NANO = Path(__file__).parent.parent
# The formats of linear layers that a quantisation asks for, the one of the output layer last. Float
# weights that do not fit bfloat16 ask for float32 when they are read: a guess is enough here.
_FORMATS = {
    "int8": ("quant/int8",),
    "w8a8": ("quant/w8a8", "quant/int8"),
    "int4": ("quant/int4", "quant/int8"),
    "w4a8": ("quant/w4a8", "quant/int4", "quant/int8"),
    "awq": ("quant/int4", "layers/bfloat16"),
    "gptq": ("quant/int4", "layers/bfloat16"),
    "gguf": ("quant/int4", "quant/int8"),
}


def build_kernels(config: EngineConfig) -> threading.Thread:
    """Begin to compile what a worker for `config` will load, where the cache does not have it.

    Nobody need wait for the thread: whoever loads a library waits for its own compilation.
    """
    is_narrow = config.model.dtype == "bfloat16"
    floats = "layers/w16a16" if is_narrow else "layers/bfloat16"
    formats = _FORMATS.get(config.model.quantization or "", (floats,))
    told = config.kv_cache.dtype
    cache = "bfloat16" if told == "bfloat16" or (told == "auto" and is_narrow) else "float32"
    if is_narrow and cache == "bfloat16" and multiplies_bfloat16():
        cache = "paired"
    names = (  # in the order in which a worker asks
        "layers/cpu_rows",
        *(f"{name}_linear" for name in formats),
        f"attention/{cache}_attention",
        "sampling/cpu_sampling",
    )
    sources = [_NANO / f"{name}.cpp" for name in names]
    thread = threading.Thread(target=_build, args=(sources,), name="build-kernels", daemon=True)
    thread.start()
    return thread


def _build(sources: list[Path]) -> None:
    """As many at once as there are cores: more would only make the first ones wait."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda source: build_all([source]), sources):
            pass
