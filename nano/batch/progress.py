"""Progress: how far a batch has come, as a bar on stderr."""

import sys
import time
from typing import Any

import msgspec
from tqdm import tqdm

from nano.batch.output_file import OutputFile

TERMINAL_SECONDS = 0.2  # between two looks of the bar
FILE_SECONDS = 10.0


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0  # as the Responses API says it


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


_counted = msgspec.json.Decoder(_Counted)


class Progress:
    """Counts of this run, and of the lines that earlier ones did."""

    def __init__(self, num_lines: int | None, output: OutputFile):
        self.num_answered = 0
        self.num_failed = 0
        self.num_tokens = 0
        self._num_failed_before = sum(done.is_failed for done in output.done.values())
        self._started = self._last = time.monotonic()
        is_terminal = sys.stderr.isatty()
        self._bar: Any = tqdm(
            total=num_lines,
            initial=len(output.done),
            unit="line",
            dynamic_ncols=is_terminal,
            mininterval=TERMINAL_SECONDS if is_terminal else FILE_SECONDS,
        )

    def count(self, status: int, body: bytes) -> None:
        self.num_answered += 1
        self._last = time.monotonic()
        if status >= 400:
            self.num_failed += 1
        else:
            usage = _counted.decode(body).usage or _Usage()
            self.num_tokens += usage.completion_tokens + usage.output_tokens
        failed = self._num_failed_before + self.num_failed
        rate = f"{self.num_tokens / self.seconds:.0f}"
        self._bar.set_postfix({"failed": failed, "tokens/s": rate}, refresh=False)
        self._bar.update()

    @property
    def seconds(self) -> float:
        """From the start to the last answer."""
        return max(self._last - self._started, 1e-9)

    def close(self) -> None:
        self._bar.close()

    def __str__(self) -> str:
        return (
            f"{self.num_answered} lines answered in {self.seconds:.1f} s, {self.num_failed} of "
            f"them with an error; {self.num_tokens} tokens, {self.num_tokens / self.seconds:.0f} "
            "per second"
        )
