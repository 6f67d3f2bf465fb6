"""Mode: one way to run an engine whose answers must not tell it from the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nano.spec.options import WITHOUT_A_SECOND_MODEL, ProposerOptions, SpeculativeOptions

NUM_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class Mode:
    """`args` are engine arguments as `LLM` takes them."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)


EAGER = Mode(
    "eager", {"compile_mode": "eager", "cudagraph_mode": "NONE", "async_scheduling": False}
)


def _beside_eager(name: str, **args: Any) -> Mode:
    return Mode(name, {**EAGER.args, **args})


PIECEWISE = _beside_eager("piecewise graphs", cudagraph_mode="PIECEWISE")
FULL_GRAPHS = _beside_eager("full graphs", cudagraph_mode="FULL_AND_PIECEWISE")
_COMPILED = {"compile_mode": "compiled", "startup": "compiled-first"}
COMPILED = _beside_eager("compiled", **_COMPILED)
COMPILED_GRAPHS = _beside_eager(
    "compiled in graphs", **(_COMPILED | {"cudagraph_mode": "FULL_AND_PIECEWISE"})
)
# What a device likes best, one step ahead.
ASYNC = _beside_eager("async", cudagraph_mode="auto", async_scheduling=True)

# Those that serve first.
PLAIN_MODES = (EAGER, FULL_GRAPHS, ASYNC, COMPILED_GRAPHS, PIECEWISE, COMPILED)


def guessing_modes() -> tuple[Mode, ...]:
    """A mode for every proposer that needs no second model."""
    return tuple(_speculating(one.name, always(one)) for one in WITHOUT_A_SECOND_MODEL)


def drafting_modes(draft: Path) -> tuple[Mode, ...]:
    """A draft model in `draft`, and the same one step ahead."""
    options = SpeculativeOptions.parse(drafting_options(draft))
    return (
        _speculating("draft model", options),
        _speculating("draft model, async", options, async_scheduling=True),
    )


def synthetic_mode(draft: Path, rates: Sequence[float]) -> Mode:
    """A draft model of which so many drafts are kept, right or wrong: for timings only."""
    rule = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
    options = SpeculativeOptions.parse({**drafting_options(draft), **rule})
    return _speculating("draft model, synthetic", options)


def always(proposer: ProposerOptions) -> SpeculativeOptions:
    """A few drafts in every step, whether or not they pay."""
    short = replace(proposer, num_speculative_tokens=NUM_DRAFTS)
    return SpeculativeOptions(proposers=(short,), draft_length="static")


def drafting_options(draft: Path) -> dict[str, Any]:
    """`speculative_config` of a draft model."""
    return {
        "model": str(draft),
        "num_speculative_tokens": NUM_DRAFTS,
        "draft_length": "static",
    }


def _speculating(name: str, options: SpeculativeOptions, **args: Any) -> Mode:
    return _beside_eager(name, cudagraph_mode="auto", speculative_config=options.to_json(), **args)
