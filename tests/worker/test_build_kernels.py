"""Our C++ is compiled before torch is there."""

import subprocess
import sys
from pathlib import Path

import pytest

from nano.config import EngineConfig
from nano.native.build import multiplies_bfloat16
from nano.worker import build_kernels

ALWAYS = {"cpu_rows", "cpu_sampling"}
NARROW = "paired_attention" if multiplies_bfloat16() else "bfloat16_attention"


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {"bfloat16_linear", "float32_attention"}),
        ({"kv_cache_dtype": "bfloat16"}, {"bfloat16_linear", "bfloat16_attention"}),
        ({"dtype": "bfloat16"}, {"w16a16_linear", NARROW}),
        (
            {"dtype": "bfloat16", "kv_cache_dtype": "float32"},
            {"w16a16_linear", "float32_attention"},
        ),
        ({"quantization": "int8"}, {"int8_linear", "float32_attention"}),
        ({"quantization": "gptq"}, {"int4_linear", "bfloat16_linear", "float32_attention"}),
    ],
)
def test_what_a_worker_will_load_is_compiled(monkeypatch, options, more):
    asked: list[Path] = []
    monkeypatch.setattr(build_kernels, "build_all", asked.extend)
    build_kernels.build_kernels(EngineConfig.from_args(options)).join()
    assert {path.stem for path in asked} == ALWAYS | more
    assert all(path.is_file() and path.suffix == ".cpp" for path in asked)


def test_it_needs_no_torch():
    program = "import sys, nano.worker.build_kernels; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
