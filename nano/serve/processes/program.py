"""One of several processes that answer HTTP on one socket, `nano.serve.processes.program`.

Started by `Supervisor`, which owns the core; stdin is a socket to it. Its end is the end of the
supervisor, and so of the core and of this process. Signals are for the supervisor: what it sends
on comes over the socket, so that they may as well reach every process of the group.
"""

import io
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time

from nano.config import EngineConfig
from nano.engine.client import EngineClient
from nano.engine.socket_client import SocketClient
from nano.errors import EngineDead, NanoError
from nano.log import get_logger, setup_logging
from nano.serve.app import create_app
from nano.serve.async_engine import AsyncEngine
from nano.serve.http.server import HttpServer
from nano.serve.metrics.request_metrics import SHARED_FOLDER
from nano.serve.processes.orders import (
    Briefing,
    CoreDead,
    CoreLost,
    CoreReady,
    FromProcess,
    FromSupervisor,
    Serving,
    Stop,
    from_supervisor,
)

logger = get_logger("nano.serve.processes.program")  # run as a program, this module is __main__

ORPHAN_SECONDS = 5.0  # that a process has to leave when its supervisor is gone


class SupervisorLine:
    """The line to the supervisor: its briefing at once, the rest once `listen` is called."""

    def __init__(self) -> None:
        # Unbuffered: a buffer that a thread waits on is in the way of the interpreter's end.
        self._lines = io.FileIO(0, closefd=False)
        briefing = self._read()
        assert isinstance(briefing, Briefing), "not started by a supervisor"
        self.briefing = briefing
        self._cores: queue.SimpleQueue[str | EngineDead] = queue.SimpleQueue()
        self._folder = ""  # of the newest core
        self._http: HttpServer | None = None

    def listen(self) -> None:
        """Follow orders, in a thread of its own."""
        threading.Thread(target=self._follow, name="supervisor-line", daemon=True).start()

    def serves(self, http: HttpServer) -> None:
        """Say that callers are about to be answered. Orders to stop, which are for `http`, follow
        only then: before, the supervisor just kills this process.
        """
        self._http = http
        self._say(Serving())

    def connect(self, lost: str | None) -> EngineClient:
        """The client of the first core, or of the next: see `cores.Connect`."""
        while True:
            if lost is not None:
                self._say(CoreLost(self._folder))
            core = self._cores.get()
            if isinstance(core, EngineDead):
                raise core
            self._folder = core
            try:
                return SocketClient(core)
            except EngineDead as error:
                lost = str(error)

    def _say(self, word: FromProcess) -> None:
        os.write(0, word.line())

    def _read(self) -> FromSupervisor | None:
        try:
            line = self._lines.readline()
        except ConnectionError:  # it died with words of ours unread
            line = b""
        return from_supervisor(line) if line else None

    def _follow(self) -> None:
        while True:
            match self._read():
                case CoreReady(folder):
                    self._cores.put(folder)
                case CoreDead(reason):
                    self._cores.put(EngineDead(reason))
                case Stop():
                    assert self._http is not None
                    self._http.stop()
                case None:
                    break
        # The supervisor is gone, and the core with it: nothing is worth waiting for.
        shutil.rmtree(os.environ[SHARED_FOLDER], ignore_errors=True)
        if self._http is not None:
            self._http.stop()
            self._http.stop()
            time.sleep(ORPHAN_SECONDS)
        os._exit(1)


def main() -> int:
    # Not SIG_IGN, which a process started from here would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    line = SupervisorLine()
    options = line.briefing.options
    setup_logging(f"api-{line.briefing.index}", options.log_level)
    line.listen()
    try:
        engine = AsyncEngine.from_config(
            EngineConfig.from_sections(line.briefing.config),
            chat_template=options.template_text(),
            connect=line.connect,
        )
        http = HttpServer(create_app(engine, options), engine, options)
    except EngineDead:  # the supervisor has said why
        return 1
    except NanoError as error:
        logger.error("%s", error)
        return 1
    line.serves(http)
    with socket.socket(fileno=line.briefing.listener_fd) as listener:
        http.run([listener])
    engine.client.close()
    return http.exit_status


if __name__ == "__main__":
    sys.exit(main())
