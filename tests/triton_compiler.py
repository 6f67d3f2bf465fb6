"""Compiles Triton kernels for GPUs that this machine does not have, and reads what came out."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

ARCHITECTURES = (80, 90, 100)  # A100, H100, B200


@dataclass(frozen=True)
class Compiled:
    ptx: str
    num_registers: int
    stack_bytes: int  # per thread; what registers cannot hold lies there
    shared_bytes: int  # per program


def compile_for(
    architecture: int,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    **options: int,
) -> Compiled:
    """`types`: of the arguments, in Triton's words; those not named are i32.

    Pointers count as aligned to 16 bytes, as those of torch's tensors are.
    """
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    built = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", architecture, 32),
        options=options,
    )
    usage = _resource_usage(built.asm["cubin"])
    return Compiled(built.asm["ptx"], usage["REG"], usage["STACK"], built.metadata.shared)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "-res-usage", file.name], capture_output=True, check=True)
    return {name: int(n) for name, n in re.findall(r"(REG|STACK):(\d+)", run.stdout.decode())}
