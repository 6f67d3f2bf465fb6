"""Runs test cases in Triton's interpreter, in a process of their own, and mends it for them.

Triton decides at its import whether kernels are interpreted, for its own library too. So the cases
lie in files that pytest does not collect, and a test runs each file in a process where
TRITON_INTERPRET is set from the start: no other test meets an interpreted kernel.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def run_interpreted(cases: str) -> None:
    """Run the cases of a file, named from the repository's root, or fail with what pytest said."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", cases],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout, run.stdout


def mend_interpreter() -> None:
    """For the rest of this process: five times faster, and products of bfloat16 as they should be.

    The interpreter wraps triton.language anew whenever one jitted function calls another; once for
    each module is enough. And it multiplies the integers in which it keeps bfloat16.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    wrapped: set[int] = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if id(function.fn.__globals__) not in wrapped:
            wrapped.add(id(function.fn.__globals__))
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *rest)

    interpreter.InterpretedFunction.__call__ = call
    builder.create_dot = dot
