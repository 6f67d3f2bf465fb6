"""The linear layers of SmolLM2-135M in every packed format, and what it takes to quantise them.

pytest bench/bench_quant.py --benchmark-disable-gc -s

A case is all 121 layers of a step, in huge pages as in a model. Below each: what it read and how
that compares with what the machine can, and its arithmetic beside the float32 peak, which the
formats with 8-bit activations pass.
"""

import copy
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn

from bench.limits import Limits, measure
from nano.layers.huge_pages import move_to_huge_pages
from nano.layers.packed_weight import PackedWeight
from nano.native.build import load_threads
from nano.quant.formats import FORMATS, pack
from nano.quant.quantized_weight import QuantizedWeight
from nano.quant.schemes import SCHEMES, quantize

LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # (outputs, inputs)
SHAPES = [*LAYER * 30, (49152, 576)]
NUM_ROWS = [1, 2, 4, 5, 8, 16, 64, 256]
FORMAT_NAMES = [name for name in FORMATS if name != "split"]

measured_limits = cache(measure)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def limits(request: pytest.FixtureRequest) -> Iterator[Limits]:
    """Of this many threads, which the case then computes on."""
    pool, before = load_threads(), torch.get_num_threads()
    if pool is None:
        pytest.skip("needs a C++ compiler")
    limits = measured_limits(request.param)
    pool.nano_set_num_threads(request.param)
    torch.set_num_threads(1)
    yield limits
    pool.nano_set_num_threads(1)
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FORMAT_NAMES)
def layers(request: pytest.FixtureRequest) -> list[PackedWeight]:
    packed = {shape: _packed(request.param, shape) for shape in {*SHAPES}}
    layers = [copy.deepcopy(packed[shape]) for shape in SHAPES]
    move_to_huge_pages(nn.ModuleList(layers))
    return layers


def _packed(format: str, shape: tuple[int, int]) -> PackedWeight:
    weight = torch.randn(shape)
    matrix = quantize(weight, format) if format in SCHEMES else weight
    return pack(matrix, None, format)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_the_linear_layers_of_a_step(benchmark, capsys, limits, layers, num_rows):
    inputs = {size: torch.randn(num_rows, size) for _, size in SHAPES}

    @torch.inference_mode()
    def step() -> None:
        for layer in layers:
            layer.forward(inputs[layer.num_inputs])

    benchmark.pedantic(step, rounds=20 if num_rows < 64 else 3, warmup_rounds=1)
    seconds = benchmark.stats.stats.min
    num_bytes = sum(buffer.nbytes for layer in layers for buffer in layer.buffers())
    flops = 2 * num_rows * sum(outputs * inputs for outputs, inputs in SHAPES)
    with capsys.disabled():
        print(
            f"\n{layers[0].format}, {num_rows} rows: {seconds * 1e3:.2f} ms, "
            f"{num_bytes / 1e6:.0f} MB, {limits.bandwidth_share(num_bytes, seconds)}, "
            f"{limits.compute_share(flops, seconds)}"
        )


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantise_and_pack(benchmark, capsys, scheme):
    torch.set_num_threads(1)
    weight = torch.randn(8960, 1536)
    benchmark.pedantic(lambda: pack(quantize(weight, scheme), None, scheme), rounds=3)
    error = (quantize(weight, scheme).dequantized() - weight).norm() / weight.norm()
    with capsys.disabled():
        nanoseconds = benchmark.stats.stats.min / weight.numel() * 1e9
        print(f"\n{scheme}: {nanoseconds:.1f} ns a weight, relative error {error:.4f}")


@pytest.mark.parametrize("num_tokens", [1, 512])
def test_look_up_rows(benchmark, limits, layers, num_tokens):
    head = layers[-1]
    if not isinstance(head, QuantizedWeight):
        pytest.skip("floats have a table of their own")
    ids = torch.randint(0, head.num_outputs, (num_tokens,))
    benchmark(head.rows, ids)
