"""A choice's fields `speculative` and `speculative_trace`: what became of speculation, as JSON."""

import dataclasses
from typing import Any

from nano.outputs import SpeculationReport, SpeculationTrace


def report_json(report: SpeculationReport) -> dict[str, Any]:
    """What was in force, and what came of it: in all, and by proposer."""
    stats = report.stats
    return {
        "enabled": report.enabled,
        "methods": report.methods,
        "num_tokens": report.num_tokens,
        "num_steps": stats.num_steps,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "proposers": {
            name: {**dataclasses.asdict(proposer), "acceptance_rate": proposer.acceptance_rate}
            for name, proposer in stats.by_proposer.items()
        },
    }


def trace_json(trace: SpeculationTrace) -> dict[str, Any]:
    """Of the tokens beside it: in a stream, those of the chunk."""
    return dataclasses.asdict(trace)
