"""`python -m nano.compile --model M [engine flags] [--explain]`: compile ahead of time, and look.

Loads the model as an engine would, compiles what is not stored yet, checks it, and says what
there is. The engine starts this same program, with `--request-fd`, to compile for it.
"""

import argparse
import dataclasses
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

from nano.compile.request import CompileRequest
from nano.compile.store import MANIFEST, ArtifactStore
from nano.config import EngineConfig, add_engine_arguments, config_from_arguments
from nano.errors import ConfigError, NanoError
from nano.log import setup_logging
from nano.resolve import resolve


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nano.compile", description=__doc__)
    parser.add_argument("--explain", action="store_true", help="print all sources, too")
    parser.add_argument("--request-fd", type=int, help=argparse.SUPPRESS)
    add_engine_arguments(parser)
    args = parser.parse_args(argv)
    try:
        if args.request_fd is not None:
            _end_with_parent()
            _compile_requested(args.request_fd)
        else:
            setup_logging("compile")
            _explain(_compile_ahead(config_from_arguments(args)), args.explain)
    except (NanoError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # torch's compiler may raise anything; the last line is read
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}".partition("\n")[0], file=sys.stderr)
        return 1
    return 0


def _compile_requested(request_fd: int) -> None:
    """Compile what the engine described, unless somebody else just has."""
    with os.fdopen(request_fd, "rb") as file:
        request = CompileRequest.read(file)
    store = ArtifactStore.default()
    if store is None:
        raise ConfigError("there is no home folder to keep compiled pieces in")
    with store.building(request.key) as folder:
        if folder is None:
            return
        from nano.compile.child import compile_skeleton  # seconds: only with the lock in hand

        compile_skeleton(request, folder)


def _end_with_parent() -> None:
    """End this process group when the engine closes our stdin, by whatever end it finds."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _compile_ahead(config: EngineConfig) -> Path:
    """The folder of the pieces of a model, compiled now if they are not stored."""
    from nano.worker.worker import Worker  # torch: seconds

    options = dataclasses.replace(config.compile, mode="compiled", startup="compiled-first")
    worker = Worker(resolve(dataclasses.replace(config, compile=options)))
    worker.load()
    worker.close()
    store = ArtifactStore.default()
    folder = None if store is None else store.find(worker.target.forward.key)
    if folder is None:
        raise ConfigError("no compiled pieces came about; the log says why")
    return folder


def _explain(folder: Path, with_sources: bool) -> None:
    from nano.compile.artifact import Manifest, sources  # torch

    manifest = Manifest.read(folder)
    report = manifest.report
    print(f"{folder}")
    print(f"  {report.num_calls} pieces between {report.num_split_calls} calls of split ops")
    for index, (num_uses, seconds) in enumerate(zip(report.uses, report.piece_seconds)):
        print(f"  piece_{index}: used {num_uses} times, generated in {seconds:.1f} s")
    print(f"  traced in {report.trace_seconds:.1f} s, C++ in {report.compiler_seconds:.1f} s")
    print(f"  {len(manifest.kernels)} kernels, {len(manifest.weights)} weights")
    for name in (*manifest.digests, MANIFEST):
        print(f"  {name}: {(folder / name).stat().st_size} bytes")
    for name, value in manifest.factors.items():
        print(f"  {name} = {value}")
    if with_sources:
        for file in sources(folder):
            print(f"\n# ---- {file.relative_to(folder)}\n{file.read_text()}")


if __name__ == "__main__":
    sys.exit(main())
