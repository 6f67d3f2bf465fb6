"""Supervisor: one engine core, and several processes that answer HTTP on one socket with it.

              caller                  caller
                 \\                     /
    listening socket, which every process has inherited
          |                                   |
    front end process 1    ...    front end process N       text, HTTP
          |            \\        /            |
          |               core                |             tokens
          |                |                  |
          +-------- this process -------------+             who lives, who is to stop

The socket is inherited, and not one for each process with SO_REUSEPORT: there the kernel gives
every socket a queue of its own, and the connections in it die with their process, while those in a
shared queue are for whoever takes them. It is also the same for Unix sockets.
"""

import asyncio
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace

from nano.config import EngineConfig
from nano.engine.client import EngineClient
from nano.errors import EngineDead, NanoError
from nano.log import get_logger
from nano.serve.metrics.request_metrics import SHARED_FOLDER
from nano.serve.options import ServerOptions
from nano.serve.processes.cores import Cores
from nano.serve.processes.front_end_process import FrontEndProcess
from nano.serve.processes.orders import Briefing, CoreDead, CoreLost, CoreReady, Stop

logger = get_logger(__name__)

GRACE_SECONDS = 5.0  # beyond --shutdown-timeout, before a process that does not leave is killed
ABORT_SECONDS = 2.0  # before anybody is killed after a second order to stop


class Supervisor:
    """Starts everything, replaces what dies, passes signals on, leaves nothing behind.

    A front end process that dies while it serves is replaced; one that cannot even begin to serve
    ends the server. A core that dies is replaced `--restart-engine` times; then everything ends.
    """

    def __init__(self, options: ServerOptions, config: EngineConfig, listener: socket.socket):
        """`config` is resolved, `listener` is bound."""
        self._options = options
        self._config = config
        self._listener = listener
        self._cores = Cores(config, options.restart_engine, options.log_level)
        self._core_news: CoreReady | CoreDead | None = None
        self._front_ends: set[FrontEndProcess] = set()
        self._num_stops = 0
        self._exit_status = 0

    def run(self) -> int:
        """Serve until told to stop; the exit status, 1 if it was for want of a core or process."""
        with tempfile.TemporaryDirectory(prefix="nano-metrics-") as folder:
            os.environ[SHARED_FOLDER] = folder  # the front ends count together, and inherit this
            return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop)

        def call(function: Callable[..., None], *args: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(function, *args)

        # Not in the loop's pool, for which the end of the program would wait.
        threading.Thread(target=self._keep_core, args=(call,), name="cores", daemon=True).start()
        indices = range(1, self._options.api_server_count + 1)
        await asyncio.gather(*(self._keep_front_end(index) for index in indices))
        if self._num_stops > 1:
            loop.call_later(ABORT_SECONDS, self._cores.kill)
        await asyncio.to_thread(self._cores.close)
        return self._exit_status

    async def _keep_front_end(self, index: int) -> None:
        fd, config = self._listener.fileno(), self._config.to_sections()
        is_silent = index > 1 or self._options.disable_log_stats  # one speaks of the one core
        options = replace(self._options, disable_log_stats=is_silent)
        briefing = Briefing(index, fd, options, config)
        while not self._is_ending():
            front_end = await FrontEndProcess.start(briefing)
            self._front_ends.add(front_end)
            if self._num_stops:
                front_end.kill()
            elif self._core_news is not None:
                front_end.tell(self._core_news)
            async for word in front_end.words():
                if isinstance(word, CoreLost) and CoreReady(word.folder) == self._core_news:
                    self._cores.kill()  # whoever finds it stuck is believed
            end = await front_end.end()
            self._front_ends.discard(front_end)
            if self._is_ending():
                return
            if not front_end.has_served:
                logger.error("process %d %s before it could serve", index, end)
                self._exit_status = 1
                self._stop()
            else:
                logger.error("process %d %s; another takes its place", index, end)

    def _is_ending(self) -> bool:
        return self._num_stops > 0 or isinstance(self._core_news, CoreDead)

    def _stop(self) -> None:
        """The first time drain, the second time do not wait."""
        self._num_stops += 1
        self._listener.close()
        for front_end in self._front_ends:
            if front_end.has_served:
                front_end.tell(Stop())
            else:
                front_end.kill()
        if not self._front_ends:
            self._cores.kill()
        patience = self._options.shutdown_timeout + GRACE_SECONDS
        if self._num_stops > 1:
            patience = ABORT_SECONDS
        asyncio.get_running_loop().call_later(patience, self._kill_front_ends)

    def _kill_front_ends(self) -> None:
        for front_end in self._front_ends:
            logger.error("process with id %d does not leave; killing it", front_end.pid)
            front_end.kill()

    # --- the thread of the cores --------------------------------------------------------------

    def _keep_core(self, call: Callable[..., None]) -> None:
        """One core after the other."""
        lost: str | None = None
        while True:
            try:
                core = self._cores.connect(lost)
            except NanoError as error:
                call(self._announce, CoreDead(str(error)))
                return
            call(self._announce, CoreReady(core.folder))
            lost = wait_for_death(core)
            if self._num_stops:
                return

    def _announce(self, news: CoreReady | CoreDead) -> None:
        self._core_news = news
        if isinstance(news, CoreDead):
            logger.error("%s", news.reason)
            self._exit_status = 1
        for front_end in self._front_ends:
            front_end.tell(news)


def wait_for_death(core: EngineClient) -> str:
    """Wait until a core dies that this process asks nothing; why it did."""
    while True:
        try:
            core.recv()
        except EngineDead as error:
            return str(error)
