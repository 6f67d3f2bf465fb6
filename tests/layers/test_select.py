import pytest

from nano.layers.native_kernels import NativeKernels
from nano.layers.select import select_kernels


@pytest.mark.parametrize(
    ("dtype", "numerics", "has_compiler", "name"),
    [
        ("float32", "exact", True, "native"),
        ("float32", "fast", True, "native"),
        ("float32", "exact", False, "rows"),
        ("float32", "fast", False, "torch"),
        ("float64", "exact", True, "torch"),
        ("float64", "exact", False, "torch"),
    ],
)
def test_the_fastest_kernels_that_keep_the_promise_are_chosen(
    monkeypatch, caplog, dtype, numerics, has_compiler, name
):
    monkeypatch.setattr(NativeKernels, "is_available", staticmethod(lambda: has_compiler))
    with caplog.at_level("INFO", logger="nano"):
        assert select_kernels(dtype, numerics).name == name
    assert caplog.text.count("layers: ") == 1
    assert ("slow" in caplog.text) == (name == "rows")
