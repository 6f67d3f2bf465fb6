import pytest

from nano.errors import ConfigError
from nano.layers import select
from nano.layers.native_kernels import BFloat16Kernels, NativeKernels
from nano.layers.select import select_kernels


@pytest.mark.parametrize(
    ("dtype", "numerics", "has_compiler", "name"),
    [
        ("float32", "exact", True, "native"),
        ("float32", "fast", True, "native"),
        ("float32", "exact", False, "rows"),
        ("float32", "fast", False, "torch"),
        ("bfloat16", "exact", True, "native bfloat16"),
        ("bfloat16", "fast", True, "native bfloat16"),
        ("float64", "exact", True, "torch"),
        ("float64", "exact", False, "torch"),
    ],
)
def test_the_fastest_kernels_that_keep_the_promise_are_chosen(
    monkeypatch, caplog, dtype, numerics, has_compiler, name
):
    for kernels in (NativeKernels, BFloat16Kernels):
        monkeypatch.setattr(kernels, "is_available", staticmethod(lambda: has_compiler))
    with caplog.at_level("INFO", logger="nano"):
        assert select_kernels(dtype, numerics).name == name
    assert caplog.text.count("layers: ") == 1
    assert ("slow" in caplog.text) == (name == "rows")


def test_bfloat16_needs_a_compiler_and_says_so(monkeypatch):
    monkeypatch.setattr(BFloat16Kernels, "is_available", staticmethod(lambda: False))
    with pytest.raises(ConfigError, match="dtype=bfloat16 on a CPU needs a C"):
        select_kernels("bfloat16", "exact")


@pytest.mark.parametrize("has_units", [True, False])
def test_a_cpu_without_units_for_bfloat16_is_said_to_gain_nothing(monkeypatch, caplog, has_units):
    monkeypatch.setattr(BFloat16Kernels, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr(select, "multiplies_bfloat16", lambda: has_units)
    with caplog.at_level("INFO", logger="nano"):
        select_kernels("bfloat16", "exact")
    assert ("takes as long" in caplog.text) != has_units
