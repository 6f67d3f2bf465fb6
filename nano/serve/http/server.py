"""HttpServer: the socket, the certificates and the HTTP of one process. uvicorn underneath."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from nano.errors import ConfigError, EngineUnavailable
from nano.log import get_logger
from nano.serve.async_engine import AsyncEngine
from nano.serve.http.protocol import HttpProtocol
from nano.serve.options import ServerOptions

logger = get_logger(__name__)

TICK_SECONDS = 0.05
FLUSH_SECONDS = 1.0  # for callers to read the end of an answer that was cut short
# That a server whose core is dead for good goes on answering 503 with the reason: whoever looks at
# its health can read it, and whoever watches the process sees it end.
LAST_WORDS_SECONDS = 5.0
BACKLOG = 2048  # connections that wait to be accepted


class HttpServer(uvicorn.Server):  # type: ignore[misc]  # uvicorn has no types for us
    """uvicorn, with an end of our own. It leaves signals to whoever calls `stop`.

    The first `stop` drains: the listening socket closes, requests in flight have
    `--shutdown-timeout` seconds to finish, connections that are open may ask once more (for
    `/ready`, say, but not for tokens). What is not finished then ends with an error. A second
    `stop` does not wait. When the core is dead for good, the server ends by itself.
    """

    should_exit: bool

    def __init__(
        self,
        app: ASGIApp,
        engine: AsyncEngine,
        options: ServerOptions,
        kill_core: Callable[[], None] | None = None,
    ):
        """`kill_core` is for an end that must not wait for a step of the core."""
        super().__init__(
            uvicorn.Config(
                app,
                ssl_keyfile=options.ssl_keyfile,
                ssl_certfile=options.ssl_certfile,
                ssl_ca_certs=options.ssl_ca_certs,
                ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
                http=HttpProtocol,
                ws="none",
                log_config=None,  # below
                access_log=False,  # RequestLog
                server_header=False,
                # Of several processes on one socket, the one that wakes first must not take all.
                backlog=1 if options.api_server_count > 1 else BACKLOG,
                # For callers who do not read their last answer.
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self.is_aborted = False  # told to stop a second time
        self._engine = engine
        self._kill_core = kill_core
        self._shutdown_timeout = options.shutdown_timeout
        self._last_words: asyncio.TimerHandle | None = None
        # What uvicorn has to say reads like the rest. Its reports of business as usual do not help.
        theirs, ours = logging.getLogger("uvicorn"), logging.getLogger("nano")
        theirs.handlers, theirs.propagate = ours.handlers, False
        theirs.setLevel(max(logging.WARNING, ours.level))

    @property
    def exit_status(self) -> int:
        """1 if the server ended because it could not go on."""
        return 0 if self._engine.fault is None else 1

    def stop(self) -> None:
        """The order to drain, or not to wait any more. From any thread, or a signal handler."""
        self.is_aborted = self.should_exit
        self.should_exit = True

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # What is there now stays: looking through it again and again takes a tenth of a second each
        # time, in which no stream moves.
        gc.collect()
        gc.freeze()
        for listener in sockets or ():
            listener.listen(BACKLOG)
            logger.info("serving on %s (Ctrl-C ends it)", self._address(listener))

    async def on_tick(self, counter: int) -> bool:
        if self._engine.fault is not None and self._last_words is None:
            loop = asyncio.get_running_loop()
            self._last_words = loop.call_later(LAST_WORDS_SECONDS, self.stop)
        return bool(await super().on_tick(counter))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.drain()
        for server in self.servers:
            server.close()
        # Each connection that is open gets one more answer.
        state = self.server_state
        state.default_headers = [*state.default_headers, (b"connection", b"close")]
        logger.info("shutting down; %d prompts are in flight", self._engine.num_in_flight)
        await until(lambda: not state.tasks or self.is_aborted, self._shutdown_timeout)
        if state.tasks:
            self._engine.end(EngineUnavailable("the server is shutting down", "shutting_down"))
            await until(lambda: not state.tasks, FLUSH_SECONDS)
        if self.is_aborted and self._kill_core is not None:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._kill_core)
        await super().shutdown(sockets)

    def _address(self, listener: socket.socket) -> str:
        scheme = "https" if self.config.is_ssl else "http"
        if listener.family == socket.AF_UNIX:
            return f"{scheme}+unix://{listener.getsockname()}"
        host, port = listener.getsockname()[:2]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        await asyncio.sleep(TICK_SECONDS)


@contextlib.contextmanager
def listening(options: ServerOptions) -> Iterator[socket.socket]:
    """A bound socket, whose file, if it has one, goes with it.

    Raises `ConfigError` for an address that is not to be had and for certificates that are of no
    use: both are known before a model is loaded.
    """
    check_certificates(options)
    if options.uds is None:
        with _bind_port(options.host, options.port) as listener:
            yield listener
        return
    with _bind_file(Path(options.uds)) as listener:
        mine = os.stat(options.uds).st_ino
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if os.stat(options.uds).st_ino == mine:  # not that of a successor
                    os.unlink(options.uds)


def check_certificates(options: ServerOptions) -> None:
    """Raises `ConfigError` if uvicorn could not use them."""
    if options.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    name = "--ssl-certfile and --ssl-keyfile"
    try:
        # A key under a password is refused: nobody is there to be asked.
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password="")
        if options.ssl_ca_certs is not None:
            name = "--ssl-ca-certs"
            context.load_verify_locations(options.ssl_ca_certs)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from error


def _bind_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only where the protocol is named does asyncio turn off Nagle's algorithm, under which every
    # second write waits for the caller to acknowledge the first: 40 ms.
    listener = socket.socket(family, proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def _bind_file(path: Path) -> socket.socket:
    """Who may connect is for the umask to say, as for any file: with the usual 022 its owner."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        _remove_stale(path)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on --uds {path}: {reason}") from error
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that is gone. Raises `OSError` if it is anything else."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise FileExistsError(None, "it exists and is no socket")
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise FileExistsError(None, "another server listens there")
