"""TokenBudget: how many tokens of a request fit into a step, and what they take of it."""

import math

from nano.scheduler.request import Request


class TokenBudget:
    """The sizes that bound a step. See `Scheduler` for what they mean."""

    def __init__(
        self,
        num_tokens: int,
        block_size: int,
        long_prefill_token_threshold: int = 0,
        costly_context: int | None = None,
    ):
        assert num_tokens >= 1, f"token_budget must be at least 1, got {num_tokens}"
        self.num_tokens = num_tokens  # of a step
        self.chunk_cap = long_prefill_token_threshold or num_tokens
        self.costly_context = costly_context
        self._block_size = block_size

    def num_tokens_of(self, request: Request, num_computed: int, num_known: int, left: int) -> int:
        """How many tokens of a request, which has `num_known` by then and computed so many of them,
        fit into what is `left`: known ones first and then drafts.

        The last token that a request may have is never computed, which leaves no room for drafts
        that could not be accepted. 0 if the step in flight may have given it that token.
        """
        num_pending = num_known - num_computed
        if num_pending > 1 and self.costly_context is not None:
            # The largest n whose cost is within the budget, but at least one token.
            weight = self.costly_context + num_computed
            root = math.isqrt(weight**2 + 2 * left * self.costly_context)
            left = max(1, min(left, root - weight))
        if num_pending > 1 and self.chunk_cap < self.num_tokens:
            left = self._end_at_block(num_computed, num_pending, min(self.chunk_cap, left))
        room = request.max_num_tokens - 1 - num_computed
        return max(0, min(num_pending + request.num_planned_drafts, room, left))

    def cost(self, num_computed: int, num_known: int, num_tokens: int) -> int:
        """What `num_tokens` from position `num_computed` on take of the budget, in tokens.

        A decode token counts as one at any context: it is not the budget's to make it cheaper.
        """
        if self.costly_context is None or num_known - num_computed <= 1:
            return num_tokens
        mean_context = num_computed + num_tokens / 2
        return math.ceil(num_tokens * (1 + mean_context / self.costly_context))

    def _end_at_block(self, num_computed: int, num_pending: int, chunk: int) -> int:
        """`chunk`, shortened to end at a block's end if the prompt goes on behind it.

        Only there can others share the chunk whole, and this request read on in the cache.
        """
        past_block = (num_computed + chunk) % self._block_size
        return chunk - past_block if past_block < chunk < num_pending else chunk
