"""What is measured is there for every mode and batch, waits and compilations are found."""

import sys
import warnings
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from nano.device.recording_graph import RecordingCpu
from nano.gpu_check import sync_checks, timings
from nano.gpu_check.clock import CudaClock, HostClock, HostWaited, median_seconds
from nano.gpu_check.compilations import compilations
from nano.gpu_check.limits import Limits, measure_limits
from nano.gpu_check.measured_engine import measured_engine
from nano.gpu_check.modes import EAGER, FULL_GRAPHS
from nano.gpu_check.report import Outcome
from nano.gpu_check.speculation_timings import measure_speculation
from nano.gpu_check.sync_checks import check_syncs
from nano.gpu_check.timings import decode_steps, measure_steps
from nano.layers.native_kernels import NativeKernels
from nano.worker import worker
from tests.gpu_check.boxes import found, quiet_box


class StepClock(HostClock):
    """A second for each look at it."""

    def __init__(self) -> None:
        self._now = 0.0

    def mark(self) -> float:
        self._now += 1.0
        return self._now


def test_the_median_is_that_of_the_runs_behind_the_warm_up():
    runs = []
    assert median_seconds(StepClock(), lambda: runs.append(0), 5) == 1.0
    assert len(runs) == 3 + 5


def test_limits_are_rates_of_bytes_and_operations(monkeypatch):
    monkeypatch.setattr("nano.gpu_check.limits.median_seconds", lambda *_: 0.5)
    limits = measure_limits(
        torch.device("cpu"), HostClock(), torch.float32, copied_bytes=1000, matrix_size=8
    )
    assert limits == Limits(bytes_per_second=4000.0, flops_per_second=2048.0)


def test_steps_are_timed_with_the_gaps_between_them(tmp_path):
    box = quiet_box(tmp_path)
    args = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    folder = box.models.target("tiny")
    with measured_engine(folder, args | EAGER.args, StepClock()) as engine:
        assert engine.start_seconds > 0
        steps = decode_steps(engine, [[1, 2, 3], [4, 5, 6]], num_steps=9)
        assert len(steps) == 4  # the prompts' step gives the first token; four are left out
        assert {(s.num_tokens, s.num_requests) for s in steps} == {(2, 2)}
        assert {(s.seconds, s.gap_seconds) for s in steps} == {(1.0, 1.0)}


@pytest.mark.skipif(not NativeKernels.is_available(), reason="needs a C++ compiler")
def test_every_batch_the_prompt_and_the_graphs_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "make_device", lambda *_: RecordingCpu())
    monkeypatch.setattr(timings, "_MEASURED_MODES", (FULL_GRAPHS,))
    box = quiet_box(tmp_path, batches=(1, 2), prefill_len=16, num_timed_steps=6)
    box.device = RecordingCpu()
    box.limits = Limits(1e9, 1e9)
    measure_steps(box)
    assert not found(box, Outcome.BROKEN), box.report.table()
    numbers = {finding.name: finding.numbers for finding in found(box, Outcome.MEASURED)}
    for batch in (1, 2):
        step = numbers[f"tiny, full graphs: batch {batch}"]
        assert step["step_ms"] > 0
        assert step["tokens_per_s"] == pytest.approx(
            batch * 1e3 / (step["step_ms"] + step["gap_ms"])
        )
        assert step["of_bandwidth"] > 0
    assert numbers["tiny, full graphs: prompt of 16"]["of_matmul"] > 0
    graphs = numbers["tiny, full graphs: graphs"]
    assert graphs["graphs"] > 3
    assert graphs["capture_s"] > 0


def test_speculation_is_measured_against_the_same_engine_without(tmp_path):
    box = quiet_box(tmp_path, batches=(1,), num_timed_steps=24)
    measure_speculation(box)
    numbers = {finding.name: finding.numbers for finding in found(box, Outcome.MEASURED)}
    drafting = numbers["tiny, draft model, synthetic: batch 1"]
    assert 1.5 < drafting["tokens_per_step"] <= 4.0
    assert drafting["speed_up"] == pytest.approx(
        drafting["tokens_per_s"] / drafting["plain_tokens_per_s"]
    )
    assert len(numbers) == 1 + 3


def test_without_a_gpu_waits_cannot_be_seen_and_compilations_can(tmp_path, monkeypatch):
    @contextmanager
    def compiling(is_gpu):
        yield ["attend[num_warps=4]"]

    monkeypatch.setattr(sync_checks, "guessing_modes", tuple)
    box = quiet_box(tmp_path)
    check_syncs(box)
    assert found(box, Outcome.REFUSED)[0].name == "no wait in a step"
    assert "tiny auto, eager: nothing is compiled" in [f.name for f in found(box, Outcome.PASSED)]

    monkeypatch.setattr(sync_checks, "compilations", compiling)
    monkeypatch.setattr(sync_checks, "drafting_modes", lambda draft: ())
    box = quiet_box(tmp_path / "second")
    check_syncs(box)
    assert found(box, Outcome.FAILED)[0].detail == "attend[num_warps=4]"


def test_a_wait_in_a_step_is_found_with_its_place(tmp_path, monkeypatch):
    """As the section would see it on a GPU: the first wait ends a run, another run lists all."""

    class Waiting(HostClock):
        @contextmanager
        def watching_syncs(self, mode, found):
            yield
            if mode == "error":
                raise HostWaited("called a synchronizing CUDA operation")
            found["nano/sampling/sampler.py:100"] += 2

    box = quiet_box(tmp_path)
    monkeypatch.setattr(type(box), "is_gpu", True)
    monkeypatch.setattr(sync_checks, "guessing_modes", tuple)
    monkeypatch.setattr(sync_checks, "drafting_modes", lambda draft: ())
    box.clock = Waiting()
    check_syncs(box)
    failure = found(box, Outcome.FAILED)[0]
    assert failure.name == "tiny auto, eager: no wait in a step"
    assert failure.detail == "nano/sampling/sampler.py:100 (2 times)"


def test_cudas_warnings_of_waits_are_counted_by_place_and_its_errors_are_ours(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    found_places: Counter[str] = Counter()
    with CudaClock().watching_syncs("list", found_places):
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    ((place, count),) = found_places.items()
    assert place.startswith("test_timings.py:")
    assert count == 3
    with pytest.raises(HostWaited), CudaClock().watching_syncs("error", found_places):
        raise RuntimeError("called a synchronizing CUDA operation (Triggered ...)")
    others, watching = pytest.raises(RuntimeError, match="out of memory"), CudaClock()
    with others, watching.watching_syncs("error", found_places):
        raise RuntimeError("out of memory")
    assert modes == ["warn", "default", "error", "default", "error", "default"]


def test_graphs_of_dynamo_are_counted(monkeypatch):
    class Module:
        counters = {"stats": Counter()}  # noqa: RUF012

    monkeypatch.setitem(sys.modules, "torch._dynamo", Module)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", Module)
    Module.counters["stats"]["unique_graphs"] = 5
    with compilations(is_gpu=False) as compiled:
        Module.counters["stats"]["unique_graphs"] += 2
    assert compiled == ["a graph by Dynamo"] * 2
