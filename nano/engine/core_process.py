"""CoreProcess: the process of an engine core, and the folder of its sockets, which go together."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nano.config import EngineConfig

CORE_COMMAND = (sys.executable, "-m", "nano.engine.process")
CLOSE_GRACE_SECONDS = 5.0  # for the step in progress
MAX_SOCKET_PATH = 100  # bytes a Unix socket's path can safely have


class CoreProcess:
    """Starts a core and ends it. `start` and `end` are for one thread, which stays between them:
    the kernel ends the core when that thread ends (`process.py`).
    """

    def __init__(self, config: EngineConfig, command: Sequence[str], log_level: str | None):
        self.folder = _private_folder()
        self._command = [*command, "--folder", self.folder]
        self._command += ["--config", json.dumps(config.to_sections())]
        if log_level is not None:
            self._command += ["--log-level", log_level]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        # Not in our process group: Ctrl-C goes to the front end alone, which then closes us.
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, process_group=0)

    def fault(self) -> str | None:
        """How it ended, in words, or None while it runs."""
        assert self._process is not None
        match self._process.poll():
            case None:
                return None
            case status if status < 0:
                return f"it was killed by signal {-status}"
            case status:
                return f"it exited with status {status}"

    def kill(self) -> None:
        """End it at once, whatever it computes. From any thread, at any time."""
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Ask it to leave, wait a while, kill it; nothing of it is left then."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()  # the core takes this as the order to leave
            try:
                process.wait(CLOSE_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _private_folder() -> str:
    """A new folder that only this user can enter, with a path short enough for Unix sockets."""
    folder = tempfile.mkdtemp(prefix="nano-")
    if len(folder) + len("/heartbeat") > MAX_SOCKET_PATH and Path("/tmp").is_dir():
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="nano-", dir="/tmp")
    return folder
