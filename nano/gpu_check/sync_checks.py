"""Syncs: in a step the host never waits for the device, and nothing is compiled.

The one thing it may wait for is the event behind a step's results, which is no synchronising call.
What is made on first use is made in a first run; the one that is watched has prompts of other
lengths, so that what depends on them shows.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

from nano.gpu_check.box import Box
from nano.gpu_check.clock import HostWaited
from nano.gpu_check.compilations import compilations
from nano.gpu_check.measured_engine import MeasuredEngine, measured_engine
from nano.gpu_check.modes import (
    ASYNC,
    COMPILED_GRAPHS,
    EAGER,
    FULL_GRAPHS,
    Mode,
    drafting_modes,
    guessing_modes,
)
from nano.gpu_check.token_checks import engine_args

_ENGINE_SECONDS = 6.0
_MAX_NUM_TOKENS = 64  # of a step: longer prompts come in chunks
_PROMPT_LENS = ((5, 30, 90), (11, 48, 71))  # of the first run, and of the one that is watched
_NUM_TOKENS = 24
_NUM_NAMED = 3


def check_syncs(box: Box) -> None:
    name, dtype = box.sizes.token_models[0]
    if not box.is_gpu:
        box.report.refuse("no wait in a step", "needs a GPU: a CPU computes while the host waits")
    speculating = (*drafting_modes(box.models.draft(name)), *guessing_modes())
    for mode in (EAGER, FULL_GRAPHS, ASYNC, COMPILED_GRAPHS, *speculating):
        label = f"{name} {dtype}, {mode.name}"
        check = partial(_check_mode, box, label, name, dtype, mode)
        box.attempt(label, check, seconds=_ENGINE_SECONDS, mode=mode.name)


def _check_mode(box: Box, label: str, model: str, dtype: str, mode: Mode) -> None:
    first, watched = _PROMPT_LENS
    waits: Counter[str] = Counter()
    is_clean = True
    with _engine(box, model, dtype, mode) as engine:
        _run(engine, first)
        with compilations(box.is_gpu) as compiled:
            try:
                with box.clock.watching_syncs("error", waits):
                    _run(engine, watched)
            except HostWaited:
                is_clean = False
    if not is_clean:  # that engine has died of the first wait
        with _engine(box, model, dtype, mode) as engine:
            _run(engine, first)
            with compilations(box.is_gpu) as compiled, box.clock.watching_syncs("list", waits):
                _run(engine, watched)
    if box.is_gpu:
        told = ", ".join(f"{place} ({n} times)" for place, n in waits.most_common(_NUM_NAMED))
        box.report.check(f"{label}: no wait in a step", is_clean, told, waits=waits.total())
    told = ", ".join(compiled[:_NUM_NAMED])
    box.report.check(f"{label}: nothing is compiled", not compiled, told, compiled=len(compiled))


def _engine(box: Box, model: str, dtype: str, mode: Mode) -> AbstractContextManager[MeasuredEngine]:
    args = engine_args(box, dtype, len(_PROMPT_LENS[0]), max_num_tokens=_MAX_NUM_TOKENS)
    args |= {"max_model_len": 256, "enable_prefix_caching": False, "num_gpu_blocks_override": 64}
    return measured_engine(box.models.target(model), args | mode.args, box.clock)


def _run(engine: MeasuredEngine, lengths: Sequence[int]) -> None:
    """Chunks, decode, and whatever the engine verifies: prompts that repeat themselves."""
    engine.run([([7, 3, 11, 5] * length)[:length] for length in lengths], _NUM_TOKENS)
