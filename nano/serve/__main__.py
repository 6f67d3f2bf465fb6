"""`python -m nano.serve --model DIR`: an OpenAI-compatible HTTP server."""

import argparse
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

from nano.config import EngineConfig, add_engine_arguments, config_from_arguments
from nano.errors import NanoError
from nano.log import get_logger, setup_logging
from nano.resolve import resolve
from nano.serve.app import create_app
from nano.serve.async_engine import AsyncEngine
from nano.serve.http.server import HttpServer, listening
from nano.serve.options import ServerOptions, add_server_arguments, options_from_arguments
from nano.serve.processes.cores import Cores
from nano.serve.processes.supervisor import Supervisor

logger = get_logger("nano.serve")  # run as a program, this module is called __main__


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nano.serve", description=__doc__)
    add_server_arguments(parser)
    add_engine_arguments(parser)
    return parser.parse_args(argv)


class Signals:
    """What SIGTERM and SIGINT do: end the program, or whatever `stop` has been given meanwhile."""

    def __init__(self) -> None:
        self.stop: Callable[[], None] = sys.exit
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.stop()


def serve(options: ServerOptions, config: EngineConfig, signals: Signals) -> int:
    """Load the model, answer until told to stop, leave no process behind; the exit status."""
    config = resolve(config)
    with listening(options) as listener:
        if options.api_server_count > 1:
            return Supervisor(options, config, listener).run()
        cores = Cores(config, options.restart_engine, options.log_level)
        try:
            engine = AsyncEngine.from_config(
                config, chat_template=options.template_text(), connect=cores.connect
            )
            http = HttpServer(create_app(engine, options), engine, options, cores.kill)
            signals.stop = http.stop
            http.run([listener])
            signals.stop = cores.kill
            return http.exit_status
        finally:
            cores.close()


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 after an order to stop, 1 if the server could not start or go on."""
    args = parse_arguments(argv)
    setup_logging("api" if args.api_server_count == 1 else "supervisor", args.log_level)
    signals = Signals()
    try:
        config = config_from_arguments(args)
        options = options_from_arguments(args)
        names = options.served_model_name or (config.model.path,)
        return serve(replace(options, served_model_name=names), config, signals)
    except NanoError as error:
        logger.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
