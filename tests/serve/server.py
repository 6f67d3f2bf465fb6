"""A real server process for tests."""

import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import httpx
from openai import OpenAI


class Server:
    """`python -m nano.serve` on a free port, under the model name "tiny". `module` and `core` are
    the programs of the server and of its engine, where they are others.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        stderr: IO[bytes] | None = None,
        uds: Path | None = None,
        tls: tuple[Path, Path] | None = None,
        module: str = "nano.serve",
        core: str = "nano.engine.process",
    ):
        """`uds` and `tls` (a certificate and its key, of both sides) say how to reach it."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        command = [sys.executable, "-m", module, "--model", str(folder)]
        command += ["--port", str(port), "--served-model-name", "tiny", "--log-level", "warning"]
        command += ["--shutdown-timeout", "2"]
        command += ["--max-lag-ms", "60000"]  # however slow this machine is
        command += [] if uds is None else ["--uds", str(uds)]
        self._core_module = core
        self.process = subprocess.Popen([*command, *arguments], stderr=stderr)
        context = ssl.create_default_context(cafile=None if tls is None else tls[0])
        if tls is not None:
            context.load_cert_chain(*tls)
        transport = httpx.HTTPTransport(verify=context, uds=None if uds is None else str(uds))
        self.http = httpx.Client(base_url=self.url, timeout=30, transport=transport)
        deadline = time.monotonic() + 60
        while not self._is_up():
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.1)
        self.core_pid = self.core()

    def _is_up(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def core(self) -> int:
        """The process id of its engine core, whichever it is now."""
        return processes(self.process.pid, self._core_module)[0]

    def front_ends(self) -> list[int]:
        """The process ids of those that answer HTTP, if there are several."""
        return processes(self.process.pid, "nano.serve.processes.program")

    def client(self, timeout: float = 30) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=timeout)

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Ask it to end; its exit status. Safe to call twice."""
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.http.close()


def children(pid: int) -> list[int]:
    """Process ids of the living children of `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if fields[0] != "Z" and int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def processes(parent: int, module: str) -> list[int]:
    """The living children of `parent` that run `module`."""
    return [pid for pid in children(parent) if module in arguments(pid)]


def arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []  # it ended meanwhile
