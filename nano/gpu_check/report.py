"""Report: what the check has found, printed as it comes, as a table at the end, and as JSON."""

import json
import math
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TextIO

_NUM_TRACE_LINES = 6


class Outcome(StrEnum):
    PASSED = "ok"
    FAILED = "FAILED"  # a check of correctness
    BROKEN = "BROKEN"  # an exception nobody expected
    REFUSED = "refused"  # not to be had here, with the reason
    LEFT_OUT = "left out"  # for want of time, or as told
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `numbers` are in the unit that ends their name."""

    section: str
    name: str
    outcome: Outcome
    detail: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        numbers = ", ".join(f"{name} {_spell(value)}" for name, value in self.numbers.items())
        rest = "; ".join(part for part in (numbers, self.detail) if part)
        return f"[{self.section}] {self.outcome:<8} {self.name}{': ' + rest if rest else ''}"


class Report:
    """Findings in their order. `section` is whose they are now."""

    def __init__(self, facts: Mapping[str, str], out: TextIO | None = None):
        """facts: what the check runs on. out: where lines go, standard output unless given."""
        self.facts = dict(facts)
        self.findings: list[Finding] = []
        self.section = ""
        self.is_interrupted = False
        self._out = out or sys.stdout

    @property
    def has_failed(self) -> bool:
        return any(found.outcome in (Outcome.FAILED, Outcome.BROKEN) for found in self.findings)

    @property
    def verdict(self) -> str:
        if self.has_failed:
            return "failed"
        return "interrupted" if self.is_interrupted else "passed"

    @property
    def exit_status(self) -> int:
        return {"passed": 0, "failed": 1, "interrupted": 130}[self.verdict]

    def check(self, name: str, is_good: bool, detail: str = "", /, **numbers: float) -> None:
        self._add(name, Outcome.PASSED if is_good else Outcome.FAILED, detail, numbers)

    def measure(self, name: str, /, **numbers: float) -> None:
        self._add(name, Outcome.MEASURED, "", numbers)

    def refuse(self, name: str, why: object) -> None:
        self._add(name, Outcome.REFUSED, str(why))

    def leave_out(self, name: str, why: str) -> None:
        self._add(name, Outcome.LEFT_OUT, why)

    def broke(self, name: str, error: BaseException) -> None:
        """With the last lines of the error's traceback."""
        lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
        self._add(name, Outcome.BROKEN, "\n    ".join(["", *lines[-_NUM_TRACE_LINES:]]))

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def table(self) -> str:
        """What was measured, section by section, then what failed, then the counts."""
        lines: list[str] = []
        measured = [found for found in self.findings if found.outcome == Outcome.MEASURED]
        for section in dict.fromkeys(found.section for found in measured):
            lines += ["", *_rows([found for found in measured if found.section == section])]
        bad = [f for f in self.findings if f.outcome in (Outcome.FAILED, Outcome.BROKEN)]
        lines += ["", *(found.line() for found in bad)]
        counts = Counter(found.outcome for found in self.findings)
        said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
        return "\n".join([*lines, f"{self.verdict}: {said or 'nothing was checked'}"])

    def write(self, file: Path, seconds: float) -> None:
        """As JSON, which knows no infinity: such a number is null there."""
        findings = [asdict(found) for found in self.findings]
        for found in findings:
            numbers = found["numbers"].items()
            found["numbers"] = {name: x if math.isfinite(x) else None for name, x in numbers}
        record = {
            "verdict": self.verdict,
            "seconds": round(seconds, 1),
            "facts": self.facts,
            "findings": findings,
        }
        file.write_text(json.dumps(record, indent=1), encoding="utf-8")

    def _add(
        self, name: str, outcome: Outcome, detail: str, numbers: dict[str, float] | None = None
    ) -> None:
        found = Finding(self.section, name, outcome, detail, numbers or {})
        self.findings.append(found)
        self.say(found.line())


def _rows(findings: list[Finding]) -> list[str]:
    """A table of one section: a row for each finding, a column for each number that any has."""
    columns = list(dict.fromkeys(name for found in findings for name in found.numbers))
    head = [findings[0].section, *columns]
    body = [
        [found.name, *(_spell(found.numbers[c]) if c in found.numbers else "" for c in columns)]
        for found in findings
    ]
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    return [
        row[0].ljust(widths[0])
        + "".join(f"  {cell.rjust(width)}" for cell, width in zip(row[1:], widths[1:]))
        for row in [head, *body]
    ]


def _spell(value: float) -> str:
    """Three or four digits that count."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"
