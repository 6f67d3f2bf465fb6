"""LaunchSequence: what the host made a device do in one step, in order. Torch-free."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Kind = Literal[
    "copy",  # host -> device
    "plan",  # host work of attention, once per pass of a model
    "graph",  # which graph was chosen for the pass, and why
    "eager",  # or why none was
    "replay",  # of one graph
    "attention",  # of one layer, between graphs
    "operator",  # of torch, launched from the host
    "sampling",  # over rows of logits
    "read",  # device -> host, queued
    "wait",  # the host stops for a read
]

_MOST_PERIOD = 16  # lines of the longest pattern that is looked for: a pass of a draft model


@dataclass(frozen=True, slots=True)
class Launch:
    kind: Kind
    what: str
    model: str = ""  # the proposer whose model it serves; "" for the target


class LaunchSequence:
    """Collects while somebody listens. `model`: whom launches are for that do not say so."""

    def __init__(self) -> None:
        self.model = ""
        self._launches: list[Launch] | None = None
        self._num_hiding = 0

    def add(self, kind: Kind, what: str, model: str | None = None) -> None:
        if self._launches is not None and not self._num_hiding:
            self._launches.append(Launch(kind, what, self.model if model is None else model))

    @contextmanager
    def listening(self) -> Iterator[list[Launch]]:
        """What is launched inside the block, in a list that grows."""
        assert self._launches is None, "somebody listens already"
        self._launches, self.model = [], ""
        try:
            yield self._launches
        finally:
            self._launches = None

    @contextmanager
    def hiding(self) -> Iterator[None]:
        """What is launched inside the block is part of what was added before it."""
        self._num_hiding += 1
        try:
            yield
        finally:
            self._num_hiding -= 1


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was listened to."""

    name: str
    num_requests: int
    num_tokens: int
    launches: Sequence[Launch]

    @property
    def counts(self) -> dict[str, int]:
        """By kind, in order of appearance."""
        return dict(Counter(launch.kind for launch in self.launches))

    def text(self) -> str:
        """A line for each launch, with repetitions drawn together."""
        size = f"{counted(self.num_requests, 'request')}, {counted(self.num_tokens, 'token')}"
        lines = [f"{self.name}: {size}"]
        lines += _folded(_merged(self.launches))
        counts = ", ".join(f"{kind} {count}" for kind, count in self.counts.items())
        return "\n".join([*lines, f"     = {counts}"])


def counted(num: int, noun: str) -> str:
    """As "1 row" and "2 rows"."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


def _merged(launches: Sequence[Launch]) -> list[Launch]:
    """Operators side by side, and a copy or a call that comes several times running, as one."""
    merged = []
    for (kind, model), run in groupby(launches, lambda launch: (launch.kind, launch.model)):
        if kind == "operator":
            names = Counter(launch.what for launch in run)
            what = ", ".join(f"{name} x {n}" if n > 1 else name for name, n in names.items())
            merged.append(Launch(kind, f"{names.total()}: {what}", model))
        else:
            merged += run
    return merged


def _folded(launches: list[Launch]) -> list[str]:
    """Lines, with `num x` in front of the first of a pattern that repeats."""
    patterns = [_without_numbers(launch) for launch in launches]
    lines, i = [], 0
    while i < len(launches):
        period, num = _repetition(patterns, i)
        for j in range(i, i + period):
            first, last = launches[j], launches[j + (num - 1) * period]
            count = f"{num} x" if num > 1 and j == i else ""
            what = first.what
            if num > 1 and first != last:
                what += f" ... {last.what}"
            who = f" [{first.model}]" if first.model else ""
            lines.append(f"{count:>6} {first.kind:<10} {what}{who}")
        i += period * num
    return lines


def _without_numbers(launch: Launch) -> tuple[str, str, str]:
    """What has to be alike in repetitions: all but which layer and which piece it is."""
    is_numbered = launch.kind in ("replay", "attention")
    what = re.sub(r"\d+", "", launch.what) if is_numbered else launch.what
    return launch.kind, what, launch.model


def _repetition(patterns: list[tuple[str, str, str]], start: int) -> tuple[int, int]:
    """(period, how often): the shortest pattern from `start` on that repeats; (1, 1) for none."""
    for period in range(1, _MOST_PERIOD + 1):
        pattern, num = patterns[start : start + period], 1
        while patterns[start + num * period : start + (num + 1) * period] == pattern:
            num += 1
        if num > 1:
            return period, num
    return 1, 1
