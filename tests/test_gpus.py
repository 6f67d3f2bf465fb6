"""Which GPUs there are, as a driver would say it that is none."""

import ctypes.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nano import gpus
from nano.gpus import Gpu, Gpus, find_gpus

COMPILER = shutil.which("cc") or shutil.which("g++")
# Three GPUs, as many of them as CUDA_VISIBLE_DEVICES has letters.
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int begun = 0;
int cuInit(unsigned flags) { begun = 1; return flags ? 1 : getenv("BROKEN") ? 999 : 0; }
int cuDeviceGetCount(int *n) {
    *n = strlen(getenv("CUDA_VISIBLE_DEVICES"));
    return begun ? 0 : 3;
}
int cuDeviceGet(int *device, int index) { *device = 10 + index; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    return snprintf(name, size, "GPU number %d", device) >= size;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75 ? device - 2 : which == 76 ? 6 : -1;
    return 0;
}
"""


@pytest.fixture(autouse=True)
def torch_of_a_gpu(monkeypatch):
    monkeypatch.setattr(gpus, "version", lambda name: {"torch": "2.13.0+cu130"}[name])
    find_gpus.cache_clear()
    yield
    find_gpus.cache_clear()


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler, and Linux")
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [COMPILER, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.mark.usefixtures("driver")
def test_the_driver_is_asked_for_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "ab")
    found = find_gpus()
    assert found == Gpus((Gpu("GPU number 10", (8, 6)), Gpu("GPU number 11", (9, 6))))
    assert find_gpus("cuda:1") == found
    assert len(find_gpus("GPU-12").found) == len("GPU-12")  # the variable says the UUID
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    find_gpus.cache_clear()
    assert find_gpus() == Gpus()


@pytest.mark.usefixtures("driver")
def test_a_driver_that_fails_is_the_reason(monkeypatch):
    monkeypatch.setenv("BROKEN", "1")
    reason = "no GPU is visible: the CUDA driver's cuInit returns 999"
    assert find_gpus() == Gpus(why_none=reason)


@pytest.mark.skipif(ctypes.util.find_library("cuda") is not None, reason="there is a driver")
def test_without_a_driver_it_says_so():
    reason = "no GPU is visible: there is no CUDA driver (libcuda.so.1)"
    assert find_gpus() == Gpus(why_none=reason)


def test_a_torch_for_cpus_has_none_and_nobody_is_asked(monkeypatch):
    monkeypatch.setattr(gpus, "version", lambda name: "2.13.0+cpu")
    monkeypatch.setattr(gpus.subprocess, "run", None)
    assert find_gpus() == Gpus(why_none="torch 2.13.0+cpu is built without CUDA")


def test_a_gpu_is_named_by_its_place_or_as_the_only_one():
    found = Gpus((Gpu("a", (8, 0)), Gpu("b", (9, 0))))
    names = {
        "cuda": "a",
        "cuda:0": "a",
        "cuda:1": "b",
        "MIG-1": "a",
        "cuda:2": None,
        "cuda:x": None,
    }
    for device, name in names.items():
        gpu = found.named(device)
        assert (gpu and gpu.name) == name
