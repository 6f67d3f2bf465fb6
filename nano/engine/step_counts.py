"""StepCounts: how many tokens the steps of a core computed and gave."""

from bisect import bisect_left
from collections.abc import Sequence

from nano.outputs import TokenOutput

STEP_TOKEN_BOUNDS = tuple(2**power for power in (0, *range(3, 15)))  # vLLM's: 1, 8, 16 to 16384


class StepCounts:
    """Since the start. A step counts once it is done."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_generated_tokens = 0
        self._num_steps_by_size = [0] * (len(STEP_TOKEN_BOUNDS) + 1)

    def add(self, num_tokens: int, news: Sequence[TokenOutput]) -> None:
        """A step that computed `num_tokens`, and what came of it."""
        self.num_steps += 1
        self.num_computed_tokens += num_tokens
        self.num_generated_tokens += sum([len(output.new_token_ids) for output in news])
        self._num_steps_by_size[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1

    def counters(self) -> dict[str, float]:
        """As Prometheus writes them: `num_steps{le="8"}` is of steps of up to 8 tokens."""
        counts: dict[str, float] = {
            "num_steps": self.num_steps,
            "num_computed_tokens": self.num_computed_tokens,
            "num_generated_tokens": self.num_generated_tokens,
        }
        num_steps = 0
        for bound, num_more in zip(STEP_TOKEN_BOUNDS, self._num_steps_by_size):
            num_steps += num_more
            counts[f'num_steps{{le="{bound}"}}'] = num_steps
        return counts
