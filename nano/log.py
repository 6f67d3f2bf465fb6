"""One logging setup. Every process of nano writes `time level [process] message` to stderr."""

import contextlib
import logging
import os
import sys

_ROOT = "nano"


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; `name` is its `__name__`."""
    return logging.getLogger(name)


def setup_logging(process: str = "main", level: str | None = None) -> None:
    """Attach one stderr handler to nano's loggers. Called once by each process' entry point.

    A library user who configured logging already is left alone: `LLM` calls this only if
    nobody has attached a handler.
    """
    logger = logging.getLogger(_ROOT)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    handler = _LineHandler()
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)-7s [{process}] %(message)s", "%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel((level or os.environ.get("NANO_LOG_LEVEL") or "INFO").upper())
    logger.propagate = False


def write_line(line: str) -> None:
    """Append `line` to stderr. A disk that is full or a closed stderr loses it, no more."""
    data = (line + "\n").encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr and sys.stderr is not sys.__stderr__:
            sys.stderr.write(data.decode())  # somebody captures what is said
        elif sys.stderr:
            # In one piece, past Python's buffer: processes share the file, and what could not be
            # written neither comes back later nor makes Python end with a status of its own.
            os.write(sys.stderr.fileno(), data)


class _LineHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # arguments that do not fit the message
            self.handleError(record)
        else:
            write_line(line)


def ensure_logging() -> None:
    """Set logging up unless the embedding program has done so."""
    if not logging.getLogger(_ROOT).handlers and not logging.getLogger().handlers:
        setup_logging()
