"""The attention checks pass where all is well, and name what is not."""

import pytest
import torch

from nano.attention.cpu_backend import CpuBackend
from nano.attention.torch_backend import TorchBackend
from nano.gpu_check import attention_checks
from nano.gpu_check.attention_checks import check_attention, error_of
from nano.gpu_check.report import Outcome
from tests.gpu_check.boxes import found, quiet_box


class Faulty(TorchBackend):
    """One that every test breaks in its own way. It promises the bits of its rows."""

    name = "triton"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs the section over the faulty backend alone."""
    select = attention_checks.select_backend
    monkeypatch.setattr(
        attention_checks,
        "select_backend",
        lambda name, layers, device: select(name, layers, device) if name != "triton" else Faulty,
    )

    def run():
        box = quiet_box(tmp_path, attention_dtypes=(("float32", "float32"),))
        box.backends_to_check = ("triton",)
        check_attention(box)
        return box

    return run


def test_a_backend_that_is_off_by_a_hundredth_is_found_and_named(check, monkeypatch):
    forward = Faulty.forward

    def off(self, q, k, v, kv_cache, out):
        forward(self, q, k, v, kv_cache, out)
        out[len(out) // 2, 0, 0] += 1e-2

    monkeypatch.setattr(Faulty, "forward", off)
    failures = found(check(), Outcome.FAILED)
    assert failures[0].name == "triton, tiny float32, float32 cache"
    assert 0.003 < failures[0].numbers["error"] < 0.011  # relative to what is more than 1
    assert failures[0].detail == "bound 1.0e-05"


def test_rows_that_see_a_token_too_many_are_found(check, monkeypatch):
    plan = Faulty.plan

    def see_all(self, metadata):
        plan(self, metadata)
        self._requests = [(*request[:4], None) for request in self._requests]

    monkeypatch.setattr(Faulty, "plan", see_all)
    assert "triton, tiny float32, float32 cache" in [f.name for f in found(check(), Outcome.FAILED)]


def test_padding_that_writes_is_found(check, monkeypatch):
    write = Faulty.write

    def write_padding_too(self, k, v, kv_cache):
        is_finite = write(self, k, v, kv_cache)
        keys = kv_cache.flatten(1, 2)[0]
        keys[int(keys.isnan().flatten(1).all(1).nonzero()[0])] = 0.0  # nobody's so far
        return is_finite

    monkeypatch.setattr(Faulty, "write", write_padding_too)
    failures = {f.name: f.numbers for f in found(check(), Outcome.FAILED)}
    assert failures["triton, tiny float32, float32 cache: padding writes nothing"]["stray_values"]
    assert "triton, tiny float32, float32 cache" not in failures


def test_bits_that_depend_on_the_batch_are_found_with_the_request(check, monkeypatch):
    forward = Faulty.forward

    def depend(self, q, k, v, kv_cache, out):
        forward(self, q, k, v, kv_cache, out)
        if len(self._requests) == 1 and self._requests[0][2] == 16:  # the verification alone
            out *= 1 + 2.0**-22

    monkeypatch.setattr(Faulty, "forward", depend)
    (failure,) = found(check(), Outcome.FAILED)
    assert failure.name.endswith("equal bits in any batch")
    assert "request 3 (12 cached, 4 computed)" in failure.detail


def test_what_cannot_run_here_is_refused_with_its_reason_and_the_others_are_checked(tmp_path):
    box = quiet_box(tmp_path)
    check_attention(box)
    assert not found(box, Outcome.FAILED) + found(box, Outcome.BROKEN)
    refusals = {
        finding.name.split(",")[0]: finding.detail for finding in found(box, Outcome.REFUSED)
    }
    assert "it runs on cuda only, not on cpu" in refusals["triton"]
    assert "it runs on cuda only, not on cpu" in refusals["flashinfer"]
    assert {f.name.split(",")[0] for f in found(box, Outcome.PASSED)} == {"cpu", "torch"}
    assert box.backend_for("auto") == "cpu"
    assert box.backend_for("bfloat16") == "auto"  # nobody has served that


def test_an_error_of_a_kernel_is_told_and_the_next_backend_is_checked(check, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(Faulty, "forward", fail)
    box = check()
    (broken,) = found(box, Outcome.BROKEN)
    assert "no kernel image is available" in broken.detail
    assert box.backend_for("float32") == "auto"


def test_kernels_that_cannot_be_built_here_are_a_refusal(tmp_path, monkeypatch):
    class Unbuilt(CpuBackend):
        name = "flashinfer"

        def forward(self, *_):
            raise RuntimeError("Could not find nvcc")

    box = quiet_box(tmp_path, attention_dtypes=(("float32", "float32"),))
    box.backends_to_check = ("triton",)
    monkeypatch.setattr(attention_checks, "_BUILT_ON_FIRST_USE", "triton")
    monkeypatch.setattr(attention_checks, "_has_nvcc", lambda: False)
    select = attention_checks.select_backend
    monkeypatch.setattr(
        attention_checks,
        "select_backend",
        lambda name, *rest: Unbuilt if name == "triton" else select(name, *rest),
    )
    check_attention(box)
    (refusal,) = found(box, Outcome.REFUSED)
    assert refusal.detail == (
        "no nvcc is here to build its kernels, and none are built (Could not find nvcc)"
    )


def test_the_error_of_nothing_is_nothing_and_that_of_nan_is_infinite():
    ones = torch.ones(3)
    assert error_of(ones, ones) == 0.0
    assert error_of(torch.tensor([1.0, torch.nan, 1.0]), ones) == float("inf")
    assert error_of(10.1 * ones, 10.0 * ones) == pytest.approx(0.01, rel=1e-4)  # of what is large
