"""measure_step: how long a step takes, and so how many tokens one may have.

A token is taken to cost a + b * context seconds, from real steps at two contexts. Fewer tokens are
timed of a slower model, so that its start does not wait for this.
"""

from dataclasses import dataclass

from nano.log import get_logger
from nano.worker.step_probe import StepProbe

logger = get_logger(__name__)

_STEP_SECONDS = 0.35  # aimed at, so that a full step stays under half a second despite noise
_PROBE_SECONDS = 0.15
_FEW_TOKENS = 16
_BUDGET_UNIT = 8  # a budget is a multiple of it
_MOST_TOKENS = 256
_FAR_CONTEXT = 2048
_MAX_AUTO_BUDGET = 8192
_DRAFT_CONTEXT = 128
_DRAFT_SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a full step was measured to take."""

    seconds: float
    token_budget: int
    # Context at which attending costs a token as much as all else; None: the budget was told.
    costly_context: int | None
    # (tokens, seconds): the two sizes that were timed, for who wants no more than an idea.
    verification_seconds: tuple[tuple[int, float], ...]


def measure_step(probe: StepProbe, max_model_len: int, token_budget: int | None) -> StepCost:
    """Time some steps, and choose the token budget unless it is told."""
    few = min(_FEW_TOKENS, max_model_len)
    few_seconds = probe.seconds(0, few, num_runs=2)
    affordable = int(_PROBE_SECONDS / few_seconds) * few
    num_tokens = min(max(few, affordable), _MOST_TOKENS, max_model_len)
    many_seconds = probe.seconds(0, num_tokens, num_runs=3)
    per_token = many_seconds / num_tokens
    one_seconds = probe.seconds(0, 1, num_runs=3)
    by_size = {1: one_seconds, few: few_seconds, num_tokens: many_seconds}
    timed = tuple(sorted(by_size.items()))
    if token_budget is not None:
        return StepCost(token_budget * per_token, token_budget, None, timed)
    costly_context = None
    far = min(_FAR_CONTEXT, max_model_len - few)
    if far >= num_tokens:
        slope = (probe.seconds(far, few, num_runs=2) - few_seconds) / few / far
        if slope > 0:
            per_token = max(per_token - slope * num_tokens / 2, per_token / 2)
            costly_context = max(1, int(per_token / slope))
    affordable = min(int(_STEP_SECONDS / per_token), _MAX_AUTO_BUDGET)
    budget = max(_FEW_TOKENS, affordable // _BUDGET_UNIT * _BUDGET_UNIT)
    logger.info(
        "max_num_batched_tokens: %d (measured %.3f ms per token, twice that at a context of %s; a "
        "full step takes %.2f s)",
        budget,
        per_token * 1e3,
        costly_context,
        budget * per_token,
    )
    return StepCost(budget * per_token, budget, costly_context, timed)


def measure_verification(probe: StepProbe, max_model_len: int) -> tuple[tuple[int, float], ...]:
    """(tokens, seconds) of steps that verify drafts: all tokens but one are drafts."""
    context = min(_DRAFT_CONTEXT, max_model_len - 1)
    timed = []
    for num_tokens in _DRAFT_SIZES:
        if context + num_tokens > max_model_len:
            break
        seconds = probe.seconds(context, num_tokens, num_runs=4, num_drafts=num_tokens - 1)
        timed.append((num_tokens, seconds))
        if seconds > _PROBE_SECONDS:
            break
    logger.info(
        "seconds of a step by its tokens, drafts among them: %s",
        ", ".join(f"{num_tokens}: {seconds:.4f}" for num_tokens, seconds in timed),
    )
    return tuple(timed)
