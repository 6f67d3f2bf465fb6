"""LineReader: the lines of a file or a pipe, read ahead by a thread of its own."""

import asyncio
import io
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError

from nano.errors import ConfigError

CHUNK_BYTES = 1 << 18
NUM_CHUNKS_AHEAD = 2
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Lines = list[bytes]


class LineReader:
    """An async iterator of (number from 1, line) over the lines that are not blank.

    A pipe whose writer is slow holds up nobody, and memory does not grow with the file. Path "-" is
    standard input. Raises `ConfigError` if the file cannot be opened.
    """

    def __init__(self, path: str):
        try:
            source = sys.stdin.fileno() if path == "-" else path
            self._file = io.BufferedReader(io.FileIO(source))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        self.num_lines = self._count()

    def _count(self) -> int | None:
        """None if nothing can be read twice."""
        if not self._file.seekable():
            return None
        num_lines = sum(1 for line in self._file if line.strip())
        self._file.seek(0)
        return num_lines

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        chunks: asyncio.Queue[Lines | OSError | None] = asyncio.Queue(NUM_CHUNKS_AHEAD)
        loop = asyncio.get_running_loop()
        # A daemon: one that waits for a pipe must not keep the program from ending.
        threading.Thread(target=self._read, args=(loop, chunks), daemon=True).start()
        number = 0
        while (lines := await chunks.get()) is not None:
            if isinstance(lines, OSError):
                raise lines
            for line in lines:
                number += 1
                text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if text.strip():
                    yield number, text

    def _read(
        self, loop: asyncio.AbstractEventLoop, chunks: "asyncio.Queue[Lines | OSError | None]"
    ) -> None:
        def put(lines: Lines | OSError | None) -> None:
            putting = chunks.put(lines)
            try:
                asyncio.run_coroutine_threadsafe(putting, loop).result()
            finally:
                putting.close()

        parts: list[bytes] = []  # of a line whose end is still to come
        try:
            while chunk := self._file.read1(CHUNK_BYTES):
                first, *others = chunk.split(b"\n")
                parts.append(first)
                if others:
                    put([b"".join(parts), *others[:-1]])
                    parts = [others[-1]]
            put([b"".join(parts)])
            put(None)
        except OSError as error:
            put(error)
        except (RuntimeError, CancelledError):
            pass  # the run ended before the file
