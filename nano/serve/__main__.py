"""`python -m nano.serve --model DIR`: an OpenAI-compatible HTTP server."""

import argparse
import asyncio
import signal
import socket
import sys
from dataclasses import replace
from types import FrameType

import uvicorn

from nano.config import EngineConfig, add_engine_arguments, config_from_arguments
from nano.errors import ConfigError, NanoError
from nano.log import get_logger, setup_logging
from nano.serve.app import create_app
from nano.serve.async_engine import AsyncEngine
from nano.serve.options import ServerOptions, add_server_arguments, options_from_arguments

logger = get_logger("nano.serve")  # run as a program, this module is called __main__

SHUTDOWN_SECONDS = 5  # that requests in flight have to end after the order to stop


class HttpServer(uvicorn.Server):  # type: ignore[misc]  # uvicorn has no types for us
    """uvicorn, which ends what is still in flight `SHUTDOWN_SECONDS` after the order to stop."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine):
        super().__init__(config)
        self._engine = engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            logger.info("serving on http://%s:%d (Ctrl-C ends it)", host, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        reason = "the server is shutting down"
        loop = asyncio.get_running_loop()
        ending = loop.call_later(SHUTDOWN_SECONDS, self._engine.fail, reason)
        await super().shutdown(sockets)
        ending.cancel()


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nano.serve", description=__doc__)
    add_server_arguments(parser)
    add_engine_arguments(parser)
    return parser.parse_args(argv)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket: whether the address is to be had is known before a model is loaded."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def serve(options: ServerOptions, config: EngineConfig) -> None:
    """Load the model, answer until SIGINT or SIGTERM, leave no process behind."""
    with listen(options.host, options.port) as listener:
        engine = AsyncEngine.from_config(config, options.log_level)
        try:
            answer(options, engine, listener)
        finally:
            engine.client.close()


def answer(options: ServerOptions, engine: AsyncEngine, listener: socket.socket) -> None:
    http = uvicorn.Config(
        create_app(engine, options),
        log_level=options.log_level,
        # For callers who do not read their last answer.
        timeout_graceful_shutdown=2 * SHUTDOWN_SECONDS,
    )
    HttpServer(http, engine).run([listener])


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    setup_logging("api", args.log_level)

    def stop(signum: int, frame: FrameType | None) -> None:
        # uvicorn puts its own handlers in place while it serves, and raises the signal again
        # afterwards: here it must end the program without skipping what closes the engine.
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        config = config_from_arguments(args)
        options = options_from_arguments(args)
        names = options.served_model_name or (config.model.path,)
        serve(replace(options, served_model_name=names), config)
    except NanoError as error:
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
