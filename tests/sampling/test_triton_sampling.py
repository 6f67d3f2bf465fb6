"""Sampling in Triton: as torch samples (in the interpreter), and compiled for GPUs."""

import numpy as np
import pytest
import torch

from nano.sampling.select import select_backend
from nano.sampling.triton_backend import CHUNK, TritonSampling
from nano.sampling_params import SamplingParams
from tests.host_reads import DeviceOfItsOwn, NoHostReads, is_marked
from tests.sampling.rows import make_rows
from tests.triton_compiler import ARCHITECTURES, compile_for
from tests.triton_interpreter import run_interpreted


def test_the_kernels_sample_as_torch_does():
    run_interpreted("tests/sampling/triton_cases.py")


def test_it_serves_float32_logits_on_cuda_only():
    assert TritonSampling.is_available(torch.float32, torch.device("cuda"))
    assert not TritonSampling.is_available(torch.float64, torch.device("cuda"))
    assert not TritonSampling.is_available(torch.float32, torch.device("cpu"))
    assert select_backend(torch.float32, torch.device("cuda")).name == "triton"
    assert select_backend(torch.float64, torch.device("cuda")).name == "torch-batch"


class Launched:
    """In place of a kernel: remembers its launches, and computes nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        self.grids.append(grid)
        return self.launch

    def launch(self, *args, **constants) -> None:
        # Parts of tensors lie anywhere, and for another alignment Triton compiles anew.
        assert all(arg.storage_offset() == 0 for arg in args if isinstance(arg, torch.Tensor))


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}], ids=str)
def test_a_draw_is_three_launches_and_nothing_is_read(monkeypatch, setting):
    from nano.sampling import triton_kernels

    launched = Launched()
    for kernel in ("best_of_chunks", "race_of_chunks", "winners"):
        monkeypatch.setattr(triton_kernels, kernel, launched)
    rows, states = make_rows([(SamplingParams(seed=i, **setting), [1], []) for i in range(3)])
    device = DeviceOfItsOwn()
    logits = device.to_device(np.zeros((3, CHUNK + 1), np.float32))
    with NoHostReads():
        tokens = TritonSampling(device).draw(logits, rows, states, None)
    assert is_marked(tokens)
    assert launched.grids == [(3, 2), (3, 2), (3,)]
    assert device.num_copies == 0


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
