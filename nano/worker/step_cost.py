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
_MOST_TOKENS = 256
_FAR_CONTEXT = 2048
_MAX_AUTO_BUDGET = 8192


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a full step was measured to take."""

    seconds: float
    token_budget: int
    # Context at which attending costs a token as much as all else; None: the budget was told.
    costly_context: int | None


def measure_step(probe: StepProbe, max_model_len: int, token_budget: int | None) -> StepCost:
    """Time some steps, and choose the token budget unless it is told."""
    few = min(_FEW_TOKENS, max_model_len)
    few_seconds = probe.seconds(0, few, num_runs=2)
    affordable = int(_PROBE_SECONDS / few_seconds) * few
    num_tokens = min(max(few, affordable), _MOST_TOKENS, max_model_len)
    per_token = probe.seconds(0, num_tokens, num_runs=3) / num_tokens
    if token_budget is not None:
        return StepCost(token_budget * per_token, token_budget, None)
    costly_context = None
    far = min(_FAR_CONTEXT, max_model_len - few)
    if far >= num_tokens:
        slope = (probe.seconds(far, few, num_runs=2) - few_seconds) / few / far
        if slope > 0:
            per_token = max(per_token - slope * num_tokens / 2, per_token / 2)
            costly_context = max(1, int(per_token / slope))
    budget = max(16, min(int(_STEP_SECONDS / per_token), _MAX_AUTO_BUDGET) // 16 * 16)
    logger.info(
        "max_num_batched_tokens: %d (measured %.3f ms per token, twice that at a context of %s; a "
        "full step takes %.2f s)",
        budget,
        per_token * 1e3,
        costly_context,
        budget * per_token,
    )
    return StepCost(budget * per_token, budget, costly_context)
