"""Our kernels as another CPU computes with them: compiled for it, in a process of their own."""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nano.native.build import cpu_name

AVX2 = "-march=x86-64-v3"  # eight lanes, with fused multiply-adds
PLAIN = "-march=x86-64"  # four, without
FLAGS = (AVX2, PLAIN)

_IS_X86 = platform.machine() in ("x86_64", "AMD64")  # by name, too: an emulator may tell its host's

needs_x86 = pytest.mark.skipif(not _IS_X86, reason="needs an x86 CPU")
needs_avx2 = pytest.mark.skipif(
    not (_IS_X86 and {"avx2", "fma"} <= set(cpu_name().split())), reason="needs a CPU with AVX2"
)


def computed_with(flags: str, function: Callable[[], Any]) -> Any:
    """What `function` returns where kernels are compiled with `flags`.

    It must be a function of a module that a process in the repository can import, and return
    tensors, numbers and strings in lists and dicts.
    """
    program = (
        f"import sys, torch; from {function.__module__} import {function.__name__}; "
        f"torch.save({function.__name__}(), sys.argv[1])"
    )
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run(
            [sys.executable, "-c", program, file.name],
            cwd=Path(__file__).parent.parent,
            env=os.environ | {"NANO_CPU_FLAGS": flags},
            check=True,
            timeout=300,
        )
        return torch.load(file.name)
