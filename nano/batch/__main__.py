"""`python -m nano.batch -i in.jsonl -o out.jsonl --model DIR`: many requests, no server.

Input and output are in OpenAI's batch format, each line what the server would answer. Lines are
answered in any order, unless --ordered. Run again after Ctrl-C or a kill: answered lines are kept
and skipped. The exit status is 0 if every line has an answer, though it be an error.
"""

import argparse
import asyncio
import signal
import sys

from fastapi import FastAPI

from nano.batch.batch import Batch
from nano.batch.line_reader import LineReader
from nano.batch.output_file import OutputFile, check_paths
from nano.batch.progress import Progress
from nano.config import add_engine_arguments, config_from_arguments
from nano.errors import ConfigError, NanoError
from nano.log import get_logger, setup_logging
from nano.serve.app import create_app
from nano.serve.async_engine import AsyncEngine
from nano.serve.options import ServerOptions

logger = get_logger("nano.batch")  # run as a program, this module is called __main__

INTERRUPTED = 128 + signal.SIGINT


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="nano.batch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="PATH", help="lines to answer; - is stdin"
    )
    group.add_argument(
        "-o", "--output-file", required=True, metavar="PATH", help="their answers; - is stdout"
    )
    group.add_argument(
        "--max-concurrency", type=int, default=512, help="lines in flight at a time (default: 512)"
    )
    group.add_argument("--ordered", action="store_true", help="answers in the order of the lines")
    group.add_argument(
        "--served-model-name", nargs="+", help="names that lines may use (default: --model)"
    )
    group.add_argument("--chat-template", help="a Jinja template, or a file with one")
    group.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    add_engine_arguments(parser)
    return parser.parse_args(argv)


async def answer(batch: Batch, lines: LineReader, app: FastAPI) -> None:
    async with app.router.lifespan_context(app):  # starts the engine's listener
        await batch.run(lines)


def run(args: argparse.Namespace) -> None:
    """Answer every line. Raises `NanoError`, and `OSError` of the two files."""
    if args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    config = config_from_arguments(args)
    options = ServerOptions(
        served_model_name=tuple(args.served_model_name or (config.model.path,)),
        chat_template=args.chat_template,
        max_waiting_requests=sys.maxsize,  # the window is what bounds them
        max_lag_ms=None,
        disable_log_stats=True,  # there is a bar
    )
    check_paths(args.input_file, args.output_file)
    lines = LineReader(args.input_file)
    output = OutputFile(args.output_file)
    if lines.num_lines is not None and len(output.done) == lines.num_lines:
        logger.info("every line of %s has its answer already", args.input_file)
        return
    engine = AsyncEngine.from_config(config, args.log_level, options.template_text())
    progress = Progress(lines.num_lines, output)
    try:
        app = create_app(engine, options)
        batch = Batch(app, output, progress, args.max_concurrency, args.ordered)
        asyncio.run(answer(batch, lines, app))
    finally:
        progress.close()
        logger.info("%s", progress)
        engine.client.close()


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    setup_logging("batch", args.log_level)
    # asyncio ends what is in flight on SIGINT; SIGTERM shall mean the same.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        run(args)
    except KeyboardInterrupt:
        logger.warning("interrupted; the same command goes on where this one stopped")
        return INTERRUPTED
    except NanoError as error:
        logger.error("%s", error)
        return 1
    except OSError as error:
        logger.error("%s; the same command goes on where this one stopped", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
