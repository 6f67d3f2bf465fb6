"""Linear layers at the shapes of SmolLM2-135M and row operations: our kernels, and torch's.

pytest bench/bench_kernels.py --benchmark-disable-gc -s

Weights together exceed the last-level cache, as a model's do. Below each case: microseconds a call,
and its shares of what the machine can read and multiply on as many threads.
"""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from bench.limits import Limits, measure
from nano.layers.cpu_linear import FloatWeight
from nano.layers.huge_pages import move_to_huge_pages
from nano.layers.kernels import Kernels, TorchKernels
from nano.layers.native_kernels import NativeKernels
from nano.native.build import load_threads

COLD_BYTES = 100_000_000  # of weights that are read in turn
SHAPES = [(960, 576), (1536, 576), (576, 1536), (49152, 576)]  # (outputs, inputs)
NUM_ROWS = [1, 2, 4, 5, 6, 7, 8, 12, 16, 32, 64, 256, 512]
KERNELS = {"native": NativeKernels(), "torch": TorchKernels()}

measured_limits = cache(measure)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def limits(request) -> Limits:
    """Of this many threads, which the case then computes on."""
    pool, before = load_threads(), torch.get_num_threads()
    if pool is None or not NativeKernels.is_available():
        pytest.skip("needs a C++ compiler")
    limits = measured_limits(request.param)
    pool.nano_set_num_threads(request.param)
    torch.set_num_threads(request.param)
    yield limits
    pool.nano_set_num_threads(1)
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", ["bfloat16", "float32", "torch"])
def test_linear(
    benchmark, capsys, limits: Limits, kernel: str, num_rows: int, shape: tuple[int, int]
):
    num_outputs, num_inputs = shape
    num_bytes = num_outputs * num_inputs * (2 if kernel == "bfloat16" else 4)
    count = COLD_BYTES // num_bytes + 1
    x = torch.randn(num_rows, num_inputs)
    if kernel == "torch":
        weights = [torch.randn(shape) for _ in range(count)]
        benchmark(lambda: [functional.linear(x, weight) for weight in weights])
    else:
        packed = [FloatWeight.pack(torch.randn(shape), None, kernel) for _ in range(count)]
        move_to_huge_pages(nn.ModuleList(packed))
        benchmark(lambda: [weight(x) for weight in packed])
    seconds = benchmark.stats.stats.min / count
    flops = 2 * num_rows * num_outputs * num_inputs
    with capsys.disabled():
        print(
            f"\n{seconds * 1e6:.1f} us, {limits.bandwidth_share(num_bytes, seconds)}, "
            f"{limits.compute_share(flops, seconds)}"
        )


@pytest.mark.parametrize("num_rows", [1, 8, 256])
@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_rms_norm(benchmark, limits: Limits, kernels: Kernels, num_rows: int):
    x, weight = torch.randn(num_rows, 576), torch.randn(576)
    benchmark(kernels.rms_norm, x, weight, 1e-5)


@pytest.mark.parametrize("num_rows", [1, 8, 256])
@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_silu_and_mul(benchmark, limits: Limits, kernels: Kernels, num_rows: int):
    benchmark(kernels.silu_and_mul, torch.randn(num_rows, 2 * 1536))
