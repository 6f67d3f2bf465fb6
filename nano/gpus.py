"""Which GPUs CUDA would show this process, asked without torch. Standard library only.

The driver is asked in a process of its own: once CUDA is initialised, a process can neither be
shown another GPU nor be forked. `resolve` asks, so that "auto" is settled before an engine exists.
"""

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

VISIBLE = "CUDA_VISIBLE_DEVICES"

_SECONDS = 60  # a driver that nobody keeps awake takes long for many GPUs
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: tuple[int, int]  # compute capability, as (major, minor)


@dataclass(frozen=True, slots=True)
class Gpus:
    """The visible ones in CUDA's order, and if there are none the reason."""

    found: tuple[Gpu, ...] = ()
    why_none: str = ""

    def named(self, device: str) -> Gpu | None:
        """The one that is called `device` ("cuda", "cuda:1", a UUID); None if there is none."""
        index = device.partition(":")[2] or "0"
        is_there = index.isdecimal() and int(index) < len(self.found)
        return self.found[int(index)] if is_there else None


@cache
def find_gpus(device: str = "cuda") -> Gpus:
    """Those that torch could compute on. A `device` with a UUID is the only one to be seen."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        return Gpus(why_none="torch is not installed")
    if torch_version.endswith("+cpu"):
        return Gpus(why_none=f"torch {torch_version} is built without CUDA")
    environment = dict(os.environ)
    if device.startswith(("GPU-", "MIG-")):
        environment[VISIBLE] = device
    try:
        answer = subprocess.run(
            [sys.executable, "-I", __file__],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return Gpus(why_none=f"the CUDA driver did not answer within {_SECONDS} s")
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        return Gpus(why_none=lines[-1])
    return Gpus(
        tuple(Gpu(name, (major, minor)) for name, major, minor in json.loads(answer.stdout))
    )


def _ask_driver() -> list[tuple[str, int, int]]:
    """(name, major, minor) of each GPU. Initialises CUDA in this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise SystemExit("no GPU is visible: there is no CUDA driver (libcuda.so.1)") from None

    def call(function: str, *args: object) -> None:
        code = getattr(driver, function)(*args)
        if code:
            raise SystemExit(f"no GPU is visible: the CUDA driver's {function} returns {code}")

    call("cuInit", 0)
    value, gpu, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)

    def attribute(which: int) -> int:
        call("cuDeviceGetAttribute", ctypes.byref(value), which, gpu)
        return value.value

    call("cuDeviceGetCount", ctypes.byref(value))
    found = []
    for index in range(value.value):
        call("cuDeviceGet", ctypes.byref(gpu), index)
        call("cuDeviceGetName", name, len(name), gpu)
        capability = attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)
        found.append((name.value.decode(errors="replace"), *capability))
    return found


if __name__ == "__main__":
    json.dump(_ask_driver(), sys.stdout)
