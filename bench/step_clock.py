"""A device whose every step takes the same time, and whose tokens say which step made them.

What engines of all kinds add to a token is then the time from the end of its step to the moment
when a client has it. Steps are numbered; the token of step k is the letter `LETTERS[k % 64]`, whose
id is its byte in the tokenizer of `tests.tiny`. `StepClock` writes when each step ended into a file
that other processes map. Needs nothing but the standard library: it runs in other engines' Pythons.
"""

import mmap
import os
import string
import struct
import time
from collections.abc import Sequence
from pathlib import Path

LETTERS = string.ascii_letters + string.digits + "-_"
CAPACITY = 1 << 20  # steps; then the file begins anew
SECONDS_VARIABLE = "BENCH_STEP_SECONDS"
FILE_VARIABLE = "BENCH_STEP_FILE"
_TIME = struct.Struct("d")


class StepClock:
    """Written by the one process that has the device."""

    def __init__(self, path: str, seconds: float):
        self.seconds = seconds
        self._num_steps = 0
        with Path(path).open("w+b") as file:
            file.truncate(CAPACITY * _TIME.size)
            self._times = mmap.mmap(file.fileno(), 0)

    @classmethod
    def from_environment(cls) -> "StepClock":
        return cls(os.environ[FILE_VARIABLE], float(os.environ[SECONDS_VARIABLE]))

    def step(self) -> int:
        """Take a step's time; the id of its tokens."""
        time.sleep(self.seconds)
        step = self._num_steps
        self._num_steps += 1
        _TIME.pack_into(self._times, step % CAPACITY * _TIME.size, time.monotonic())
        return ord(LETTERS[step % len(LETTERS)])


class StepTimes:
    """When steps ended, for those who got their tokens. time.monotonic() seconds."""

    def __init__(self, path: str):
        with Path(path).open("rb") as file:
            data = file.read()
        times = [value for (value,) in _TIME.iter_unpack(data)]
        self._times = times[: times.index(0.0)] if 0.0 in times else times

    def delays(self, letters: str, times: Sequence[float]) -> list[float]:
        """Seconds from each token's step to `times`, when it was there.

        Which of the steps 64 apart it was follows from all tokens of one stream together: the
        latest that lets none arrive before it was made.
        """
        if not letters:
            return []
        steps = [LETTERS.index(letters[0])]
        for letter in letters[1:]:
            steps.append(steps[-1] + (LETTERS.index(letter) - steps[-1]) % len(LETTERS))
        known = self._times
        turns = (len(known) - 1 - steps[-1]) // len(LETTERS)
        for turn in range(turns, -1, -1):
            shifted = [step + turn * len(LETTERS) for step in steps]
            if all(known[step] <= arrival for step, arrival in zip(shifted, times)):
                return [arrival - known[step] for step, arrival in zip(shifted, times)]
        raise ValueError("a token was there before any step that could have made it")


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
