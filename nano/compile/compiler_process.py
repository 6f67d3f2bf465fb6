"""CompilerProcess: `python -m nano.compile` as a child of the engine.

It is a process of its own because Dynamo and Inductor take seconds to import, hold the
interpreter lock while they work, and keep half a gigabyte. In the background it has the lowest
priority there is, so that it takes only time that nobody wants. It leads a process group, with
the C++ compilers it starts; its stdin is a pipe from the engine, and the end of that pipe, for
whatever reason, is the end of the group. What it had compiled so far is then lost: a program too
short-lived to wait for it can run `python -m nano.compile --model ...` once.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

from nano.compile.request import CompileRequest

COMMAND = (sys.executable, "-m", "nano.compile")


class CompilerProcess:
    """One compilation, running."""

    def __init__(self, request: CompileRequest, *, is_background: bool):
        # Never a pipe, which would fill up unread.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryFile() as file:
            request.write(file)
            file.seek(0)
            self._process = subprocess.Popen(
                [*COMMAND, "--request-fd", str(file.fileno())],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[file.fileno()],
                process_group=0,  # not a session: that would raise its share of the CPU
            )
        if is_background:
            _make_idle(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The last line it wrote: after a failure, the reason."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with status {self.poll()} and no word"

    def close(self) -> None:
        """End it and the compilers it started. Safe to call twice."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._output.close()


def _make_idle(pid: int) -> None:
    """Let a process, with all that it starts, run only when nobody else wants to. Done from here:
    by the time it could do so itself, it has taken a core for a tenth of a second."""
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, 19)
    with suppress(AttributeError, OSError):  # Linux only
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
