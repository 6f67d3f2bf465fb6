"""OutputFile: the answers so far, in whole lines, whatever ended the run that wrote them.

Every answer is appended and flushed as it comes. Its id holds the number of its input line: that is
how the next run knows what is done, also of lines that have no custom_id or another's.
"""

import fcntl
import os
import re
import stat
import sys
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from nano.errors import ConfigError

_BEGINNING = b'{"id":"batch_req_'
_ID = re.compile(r"batch_req_([1-9][0-9]{0,17})")


class Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class AnswerLine(msgspec.Struct):
    """One line of the output, in OpenAI's format. `error` is for what is not an HTTP error: never
    here, a line that cannot be asked is answered with a 4xx.
    """

    id: str
    custom_id: str | None
    response: Response
    error: None = None


class Done(NamedTuple):
    """What a line of the output says of its input line."""

    custom_id: str | None
    is_failed: bool


class OutputFile:
    """Takes answers. `done` is what earlier runs left in the file, by the input line's number.

    Raises `ConfigError` if the file is not the output of an earlier run, or one is writing it.
    Path "-" is standard output, where nothing is ever done already.
    """

    def __init__(self, path: str):
        self.path = path
        self.done: dict[int, Done] = {}
        self._encoder = msgspec.json.Encoder()
        if path == "-":
            self._file: BinaryIO = sys.stdout.buffer
            return
        try:
            # Not "a": a torn line is to be cut off. Not "w": nothing that is there may get lost.
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._take_over()
        except BaseException:
            self._file.close()
            raise

    def append(
        self, number: int, custom_id: str | None, status: int, request_id: str, body: bytes
    ) -> None:
        """Write one answer. Raises `OSError` (a full disk); the next run cuts off what is torn."""
        response = Response(status, request_id, msgspec.Raw(body))
        line = AnswerLine(f"batch_req_{number}", custom_id, response)
        self._file.write(self._encoder.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout.buffer:
            self._file.close()

    def _take_over(self) -> None:
        """Lock the file, read what is done, cut off a torn last line."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"{self.path} is being written by another run") from None
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            raise ConfigError(f"{self.path} is not a file; standard output is called -")
        decoder = msgspec.json.Decoder(AnswerLine)
        end = 0
        for number, text in enumerate(self._file, start=1):
            is_whole = text.endswith(b"\n")
            if not is_whole and _BEGINNING.startswith(text[: len(_BEGINNING)]):
                break
            try:
                line = decoder.decode(text)
                name = _ID.fullmatch(line.id)
            except (msgspec.DecodeError, UnicodeDecodeError):
                name = None
            if not is_whole or name is None:
                raise ConfigError(f"{self.path}, line {number}, was not written by nano.batch")
            self.done[int(name[1])] = Done(line.custom_id, line.response.status_code >= 400)
            end += len(text)
        self._file.seek(end)
        self._file.truncate()


def check_paths(input_path: str, output_path: str) -> None:
    """Raises `ConfigError` if the output would be written over the input."""
    both_exist = Path(input_path).exists() and Path(output_path).exists()
    if both_exist and os.path.samefile(input_path, output_path):
        raise ConfigError(f"input and output are one file, {input_path}")
