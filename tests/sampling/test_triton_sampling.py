"""Sampling in Triton: as torch samples (in the interpreter), and compiled for GPUs."""

import pytest
import torch

from nano.sampling.select import select_backend
from nano.sampling.triton_backend import CHUNK, TritonSampling
from tests.triton_compiler import ARCHITECTURES, compile_for
from tests.triton_interpreter import run_interpreted


def test_the_kernels_sample_as_torch_does():
    run_interpreted("tests/sampling/triton_cases.py")


def test_it_serves_float32_logits_on_cuda_only():
    assert TritonSampling.is_available(torch.float32, torch.device("cuda"))
    assert not TritonSampling.is_available(torch.float64, torch.device("cuda"))
    assert not TritonSampling.is_available(torch.float32, torch.device("cpu"))
    assert select_backend(torch.float32, torch.device("cuda")).name == "triton"
    assert select_backend(torch.float64, torch.device("cuda")).name == "torch"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_race_compiles_without_spills(architecture):
    from nano.sampling.triton_kernels import race_of_chunks

    floats = ("logits", "best_values", "temperatures", "cuts", "values", "processed")
    types = dict.fromkeys(floats, "*fp32") | {
        "seeds": "*i64",
        "positions": "*i64",
        "token_ids": "*i32",
    }
    constants = {"CHUNK": CHUNK, "PADDED_CHUNKS": 128, "IS_PROCESSED_WANTED": True}
    compiled = compile_for(architecture, race_of_chunks, types, constants)
    assert compiled.stack_bytes == 0
    assert "div.rn.f32" in compiled.ptx  # else cuts would not fall where the kernel divides
    assert "lg2.approx" not in compiled.ptx  # noise near zero needs a real logarithm
