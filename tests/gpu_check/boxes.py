"""A box for one section at a time: the CPU, tiny sizes, and a report that says nothing aloud."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from nano.gpu_check.box import Box
from nano.gpu_check.program import make_box
from nano.gpu_check.report import Finding, Outcome, Report


def quiet_box(folder: Path, **sizes: Any) -> Box:
    """`sizes` are fields of `Sizes` to replace."""
    box = make_box("cpu", folder)
    box.report = Report(box.report.facts, io.StringIO())
    box.sizes = replace(box.sizes, **sizes)
    return box


def found(box: Box, outcome: Outcome) -> list[Finding]:
    return [finding for finding in box.report.findings if finding.outcome == outcome]
