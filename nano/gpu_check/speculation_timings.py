"""Speculation: how much faster an answer is with it than without, on the same engine.

A draft model of random weights guesses nothing right, so its drafts are kept at rates that are told
(the rule `synthetic`): what its passes and the verification cost is real. Who guesses from text is
given text that repeats itself, and has to earn what is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path

from nano.gpu_check.box import Box
from nano.gpu_check.measured_engine import MeasuredEngine
from nano.gpu_check.models import size_of
from nano.gpu_check.modes import Mode, guessing_modes, synthetic_mode
from nano.gpu_check.timings import ENGINE_SECONDS, prompts_of, timed_engine
from nano.speculation import RequestSpeculation

# Whole drafts kept up to each position: a draft model that is right four times in five.
_ACCEPTANCE_RATES = (0.8, 0.64, 0.512)
_LOOP = (7, 3, 11, 5, 2, 13)
_MAX_BATCH = 8

Prompts = Callable[[int], Iterable[Sequence[int]]]  # of a batch


def measure_speculation(box: Box) -> None:
    for name in box.sizes.timed_models:
        box.attempt(name, partial(_measure_model, box, name), seconds=ENGINE_SECONDS)


def _measure_model(box: Box, name: str) -> None:
    folder = box.models.target(name)
    size = size_of(folder)
    looped = (_LOOP * box.sizes.prompt_len)[: box.sizes.prompt_len]
    synthetic = synthetic_mode(box.models.draft(name), _ACCEPTANCE_RATES)
    cases: list[tuple[Mode, Prompts]] = [(synthetic, partial(prompts_of, box, size))]
    cases += [(mode, partial(repeat, looped)) for mode in guessing_modes()]
    for mode, prompts in cases:
        label = f"{name}, {mode.name}"
        measure = partial(_measure_mode, box, label, folder, mode, prompts)
        box.attempt(label, measure, seconds=ENGINE_SECONDS, mode=mode.name)


def _measure_mode(box: Box, label: str, folder: Path, mode: Mode, prompts: Prompts) -> None:
    with timed_engine(box, folder, mode) as engine:
        for batch in box.sizes.batches:
            if batch <= _MAX_BATCH:
                _compare(box, f"{label}: batch {batch}", engine, list(prompts(batch)))


def _compare(
    box: Box, label: str, engine: MeasuredEngine, prompts: Sequence[Sequence[int]]
) -> None:
    plain, _ = _seconds(box, engine, prompts, RequestSpeculation(enabled=False))
    seconds, num_steps = _seconds(box, engine, prompts, RequestSpeculation())
    box.report.measure(
        label,
        speed_up=plain / seconds,
        tokens_per_step=box.sizes.num_timed_steps / num_steps,
        plain_tokens_per_s=len(prompts) * box.sizes.num_timed_steps / plain,
        tokens_per_s=len(prompts) * box.sizes.num_timed_steps / seconds,
    )


def _seconds(
    box: Box,
    engine: MeasuredEngine,
    prompts: Sequence[Sequence[int]],
    speculation: RequestSpeculation,
) -> tuple[float, int]:
    """Of all steps that give tokens behind the first, and their number. The second run counts."""
    for _ in range(2):
        steps = engine.run(prompts, 1 + box.sizes.num_timed_steps, speculation)
    num_prompt_tokens, later = sum(map(len, prompts)), []
    for step in steps:
        if num_prompt_tokens <= 0:
            later.append(step)
        num_prompt_tokens -= step.num_tokens
    return sum(step.seconds + step.gap_seconds for step in later), len(later)
