"""Our C++ is compiled before torch is there."""

import subprocess
import sys
from pathlib import Path

import pytest

from nano.config import EngineConfig
from nano.worker import build_kernels


@pytest.mark.parametrize(("quantization", "more"), [(None, set()), ("int8", {"quant"})])
def test_what_a_worker_will_load_is_compiled(monkeypatch, quantization, more):
    asked: list[Path] = []
    monkeypatch.setattr(build_kernels, "build_all", asked.extend)
    build_kernels.build_kernels(EngineConfig.from_args({"quantization": quantization})).join()
    assert {path.parent.name for path in asked} == {"attention", "layers", "sampling"} | more
    assert all(path.is_file() and path.suffix == ".cpp" for path in asked)


def test_it_needs_no_torch():
    program = "import sys, nano.worker.build_kernels; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
