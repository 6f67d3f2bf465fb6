"""Attention: every backend that runs here against the reference on the CPU.

The bound of error is that of the arithmetic. In float32, sums of some thousand terms and a softmax
of approximate exponentials are off by some 1e-6. In bfloat16, weights and results are rounded to 8
bits, each by up to 2^-8 of itself; twice the sum is allowed. Errors count relative to 1 or to the
result, whichever is more.
"""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from nano.attention.backend import AttentionBackend, GraphSupport
from nano.attention.select import select_backend
from nano.errors import ConfigError
from nano.gpu_check.box import Box
from nano.gpu_check.models import SHAPES
from nano.gpu_check.ragged_step import RaggedStep
from nano.kv_spec import LayerKVSpec

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
# Of these the bits of a row are promised to depend on neither batch nor chunk.
_INVARIANT = ("triton", "cpu", "torch-exact")
_BUILT_ON_FIRST_USE = "flashinfer"  # by nvcc, for minutes
_PADDING = 5
_NUM_PADDING_REQUESTS = 2
_CASE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """One layer of a model, what it computes in and what it caches."""

    shape: str
    dtype: torch.dtype
    cached: str

    @property
    def name(self) -> str:
        return f"{self.shape} {self.dtype_name}, {self.cached} cache"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def step(self, box: Box) -> RaggedStep:
        shape = SHAPES[self.shape]
        spec = LayerKVSpec("layer", shape.num_kv_heads, shape.head_dim, self.cached)
        return RaggedStep(
            box.sizes.ragged, spec, shape.num_heads, self.dtype, box.device.torch_device
        )


def check_attention(box: Box) -> None:
    """Tells `box` which backends work."""
    cases = [
        Case(shape, getattr(torch, dtype), cached)
        for shape in box.sizes.attention_shapes
        for dtype, cached in box.sizes.attention_dtypes
    ]
    steps = {case: case.step(box) for case in cases}
    expected = cache(_expected)  # once for all backends, when the first asks
    for name in box.backends_to_check:
        for case in cases:
            check = partial(_check_case, box, name, case, steps[case], expected)
            box.attempt(f"{name}, {case.name}", check, seconds=_CASE_SECONDS)


def _expected(step: RaggedStep) -> Tensor:
    reference = select_backend("reference", [step.spec], torch.device("cpu"))
    return step.expected(reference.for_model(step.reference_setup), step.step)


def _check_case(
    box: Box, name: str, case: Case, step: RaggedStep, expected: Callable[[RaggedStep], Tensor]
) -> None:
    label = f"{name}, {case.name}"
    kind = select_backend(name, [step.spec], box.device.torch_device)
    backend = kind.for_model(step.setup)
    if name == _BUILT_ON_FIRST_USE:
        _build(box, label, backend, step)
    _compare(box, label, backend, step, expected(step))
    if case.cached == case.dtype_name:
        box.note_backend(name, case.cached)


def _build(box: Box, label: str, backend: AttentionBackend, step: RaggedStep) -> None:
    """What is compiled when it is first used is compiled outside the limit of time."""
    with box.deadline.outside():
        began = time.perf_counter()
        cache = step.new_cache(backend)
        try:
            step.run(backend, cache, step.context)
            _graph_rows(backend, cache, step)
            box.device.synchronize()
        except Exception as error:
            if _has_nvcc():
                raise
            why = f"no nvcc is here to build its kernels, and none are built ({error})"
            raise ConfigError(why) from error
    box.report.measure(f"{label}: built, not counted", seconds=time.perf_counter() - began)


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or (Path(home) / "bin" / "nvcc").exists()


def _compare(
    box: Box, label: str, backend: AttentionBackend, step: RaggedStep, expected: Tensor
) -> None:
    cache = step.new_cache(backend)
    step.run(backend, cache, step.context)
    out = step.run(backend, cache, step.step, _PADDING)
    rows = out[:-_PADDING]
    bound = BOUNDS[step.dtype]
    error = error_of(rows, expected)
    box.report.check(label, error <= bound, f"bound {bound:.1e}", error=error)

    written = sum(end for _, _, end in step.step) * 2 * step.spec.num_kv_heads * step.spec.head_dim
    num_stray = int((~cache.float().isnan()).sum()) - written
    is_clean = bool((out[-_PADDING:] == 77.0).all()) and num_stray == 0
    box.report.check(f"{label}: padding writes nothing", is_clean, stray_values=num_stray)
    if backend.name in _INVARIANT:
        _check_bits(box, label, backend, cache, step, rows)
    if backend.graph_support >= GraphSupport.FULL_DECODE:
        _check_graph_plan(box, label, backend, cache, step, rows)


def _check_bits(
    box: Box,
    label: str,
    backend: AttentionBackend,
    cache: Tensor,
    step: RaggedStep,
    rows: Tensor,
) -> None:
    """Each request alone, and in two chunks, gives the bits that it gave among the others."""
    different = []
    start = 0
    for request, first, end in step.step:
        wanted = rows[start : start + end - first]
        start += end - first
        middle = (first + end) // 2
        chunks = [(first, middle), (middle, end)] if middle > first else [(first, end)]
        alone = step.run(backend, cache, [(request, first, end)])
        parts = [step.run(backend, cache, [(request, *chunk)]) for chunk in chunks]
        if not (torch.equal(alone, wanted) and torch.equal(torch.cat(parts), wanted)):
            different.append(f"request {request} ({first} cached, {end - first} computed)")
    box.report.check(f"{label}: equal bits in any batch", not different, ", ".join(different))


def _check_graph_plan(
    box: Box,
    label: str,
    backend: AttentionBackend,
    cache: Tensor,
    step: RaggedStep,
    rows: Tensor,
) -> None:
    """Planned as full graphs are, beside requests of padding: the same rows, and nobody's harm."""
    planned = _graph_rows(backend, cache, step)
    error = error_of(planned, rows[: len(planned)])  # short queries come first
    error = max(error, error_of(step.run(backend, cache, step.step), rows))
    box.report.check(f"{label}: planned for a full graph", error <= BOUNDS[step.dtype], error=error)


def _graph_rows(backend: AttentionBackend, cache: Tensor, step: RaggedStep) -> Tensor:
    """Of the requests that decode, planned for a graph of a few requests more."""
    decode = [part for part in step.step if part[2] - part[1] == 1]
    num_requests = len(decode) + _NUM_PADDING_REQUESTS
    num_columns = max(-(-end // step.block_size) for _, _, end in step.step)
    backend.reserve_graph(num_requests, 1, num_columns)
    metadata = step.metadata(decode, _NUM_PADDING_REQUESTS, num_requests, num_columns)
    backend.plan_graph(metadata, num_requests)
    return step.forward(backend, cache, decode, _NUM_PADDING_REQUESTS)[: len(decode)]


def error_of(result: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to 1 or what is expected; infinite where there is NaN."""
    wanted = expected.double().cpu()
    error = (result.double().cpu() - wanted).abs() / wanted.abs().clamp(min=1.0)
    return float(error.nan_to_num(nan=torch.inf).max())
