"""Timings: steps of engines in every mode, their start-up and graphs.

A decode step must read all weights and the KV of its requests once, which the memory's bandwidth
bounds; a prompt's step is bounded by the multipliers. Both bounds are measured here, and steps are
told as shares of them.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median

from nano.gpu_check.box import Box
from nano.gpu_check.limits import measure_limits
from nano.gpu_check.measured_engine import MeasuredEngine, StepTimes, measured_engine
from nano.gpu_check.models import ModelSize, size_of
from nano.gpu_check.modes import (
    ASYNC,
    COMPILED_GRAPHS,
    EAGER,
    FULL_GRAPHS,
    NUM_DRAFTS,
    PIECEWISE,
    Mode,
)
from nano.gpu_check.token_checks import engine_args

# Those that serve first, so that they are there if time runs out.
_MEASURED_MODES = (FULL_GRAPHS, ASYNC, EAGER, PIECEWISE, COMPILED_GRAPHS)
ENGINE_SECONDS = 10.0  # that one takes from its start to its last step, roughly
_BYTES = 2  # of a weight and of a cached value: bfloat16
_MAX_QUERY_LEN = 1 + NUM_DRAFTS
_NUM_WARM_STEPS = 4  # that are not counted


def measure_box(box: Box) -> None:
    """Fills `box.limits`."""
    sizes = box.sizes
    limits = box.limits = measure_limits(
        box.device.torch_device,
        box.clock,
        sizes.model_dtype,
        copied_bytes=sizes.copied_bytes,
        matrix_size=sizes.matrix_size,
    )
    box.report.measure("memory, read and written", GB_per_s=limits.bytes_per_second / 1e9)
    dtype = str(sizes.model_dtype).removeprefix("torch.")
    box.report.measure(f"{dtype} matrix product", TFLOP_per_s=limits.flops_per_second / 1e12)


def measure_steps(box: Box) -> None:
    for name in box.sizes.timed_models:
        box.attempt(name, partial(_measure_model, box, name), seconds=ENGINE_SECONDS)


def _measure_model(box: Box, name: str) -> None:
    folder = box.models.target(name)
    size = size_of(folder)
    if name in box.models.writing:
        num_bytes, seconds = box.models.writing[name]
        box.report.measure(f"{name}: weights written", seconds=seconds, GB=num_bytes / 1e9)
    for mode in _MEASURED_MODES:
        label = f"{name}, {mode.name}"
        measure = partial(_measure_mode, box, label, folder, size, mode)
        box.attempt(label, measure, seconds=ENGINE_SECONDS, mode=mode.name)


def _measure_mode(box: Box, label: str, folder: Path, size: ModelSize, mode: Mode) -> None:
    with timed_engine(box, folder, mode) as engine:
        box.report.measure(f"{label}: start", seconds=engine.start_seconds)
        _measure_batches(box, label, engine, size)
        _measure_prompt(box, label, engine, size)
        _measure_graphs(box, label, engine)


def timed_engine(box: Box, folder: Path, mode: Mode) -> AbstractContextManager[MeasuredEngine]:
    """One that takes the largest batch, and the long prompt in one step."""
    sizes = box.sizes
    args = engine_args(box, "auto", max(sizes.batches), max_num_tokens=sizes.prefill_len)
    longest = max(sizes.prefill_len, sizes.prompt_len + sizes.num_timed_steps) + 1
    per_request = -(-(sizes.prompt_len + sizes.num_timed_steps + _MAX_QUERY_LEN) // 16)
    args |= {
        "max_model_len": longest,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": max(sizes.batches) * per_request + -(-longest // 16),
    }
    if box.is_gpu:  # of no other sizes: capturing takes time
        decode, verify = sizes.batches, (n * _MAX_QUERY_LEN for n in sizes.batches)
        args["cudagraph_capture_sizes"] = sorted({*decode, *verify})
    return measured_engine(folder, args | mode.args, box.clock)


def _measure_batches(box: Box, label: str, engine: MeasuredEngine, size: ModelSize) -> None:
    for batch in box.sizes.batches:
        if not box.deadline.has(1.0):
            box.report.leave_out(f"{label}: batch {batch}", "no time left")
            return
        steps = decode_steps(engine, prompts_of(box, size, batch), box.sizes.num_timed_steps)
        seconds, gap = (median(x) for x in zip(*((s.seconds, s.gap_seconds) for s in steps)))
        context = box.sizes.prompt_len + box.sizes.num_timed_steps / 2
        num_bytes = _BYTES * (size.num_weights + batch * context * size.kv_values_per_token)
        box.report.measure(
            f"{label}: batch {batch}",
            step_ms=seconds * 1e3,
            gap_ms=gap * 1e3,
            tokens_per_s=batch / (seconds + gap),
            **_shares(box, of_bandwidth=num_bytes / (seconds + gap)),
        )


def _shares(box: Box, **rates: float) -> dict[str, float]:
    """Of the limit that each is held against; nothing where those were not measured."""
    if box.limits is None:
        return {}
    limits = {
        "of_bandwidth": box.limits.bytes_per_second,
        "of_matmul": box.limits.flops_per_second,
    }
    return {name: rate / limits[name] for name, rate in rates.items()}


def decode_steps(
    engine: MeasuredEngine, prompts: Sequence[Sequence[int]], num_steps: int
) -> list[StepTimes]:
    """Those in which every request of the batch computes its newest token."""
    steps = engine.run(prompts, num_steps)
    full = [step for step in steps if step.num_tokens == step.num_requests == len(prompts)]
    return full[_NUM_WARM_STEPS:] or full


def prompts_of(box: Box, size: ModelSize, batch: int) -> list[list[int]]:
    """All different, all of one length."""
    length = box.sizes.prompt_len
    return [[(7 * i + 3 * p) % size.vocab_size for p in range(length)] for i in range(batch)]


def _measure_prompt(box: Box, label: str, engine: MeasuredEngine, size: ModelSize) -> None:
    num_tokens = box.sizes.prefill_len
    prompt = [p % size.vocab_size for p in range(num_tokens)]
    steps = [step for _ in range(4) for step in engine.run([prompt], 1)]
    seconds = median(step.seconds for step in steps[1:])
    num_flops = 2 * num_tokens * (size.num_weights - size.num_output_weights)
    box.report.measure(
        f"{label}: prompt of {num_tokens}",
        step_ms=seconds * 1e3,
        tokens_per_s=num_tokens / seconds,
        **_shares(box, of_matmul=num_flops / seconds),
    )


def _measure_graphs(box: Box, label: str, engine: MeasuredEngine) -> None:
    """By dropping them and capturing them once more."""
    worker = engine.executor.worker
    for graphs in worker.target.graphs:
        num_captured = len(graphs.captured)
        before = box.device.free_memory()
        graphs.forget(box.device.graph_pool())
        num_bytes = box.device.free_memory() - before
        began = time.perf_counter()
        graphs.capture_all()
        box.device.synchronize()
        box.report.measure(
            f"{label}: graphs",
            graphs=num_captured,
            MiB=num_bytes / 2**20,
            capture_s=time.perf_counter() - began,
        )
