"""RequestStates: what the worker remembers of each live request, one fixed row each.

Owner of all per-request state below the scheduler. A row is taken at admission and kept until the
request finishes or is preempted; rows never move, so nothing can be copied wrongly between
requests. Only `apply` (the plan's news) and `commit` (the step's result) write. The space behind
the known tokens is for drafts, also those that are known later than the plan (`put_drafts`).

    token_ids row:  [ prompt ........ | accepted output .. | drafts of this step | unused ]
                                       ^ num_prompt_tokens  ^ num_tokens
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nano.sampling_params import SamplingParams
from nano.step import NewRequest, StepPlan

NO_LOGPROBS = -2

# (output token ids, logits [V] it may write to) -> edited logits [V]; see sampling.logits_processor
LogitsEdit = Callable[[list[int], Tensor], Tensor]
# (parameters, prompt token ids) -> what a request's rows are edited by, in this order
MakeEdits = Callable[[SamplingParams, list[int]], tuple[LogitsEdit, ...]]


def no_edits(params: SamplingParams, prompt_token_ids: list[int]) -> tuple[LogitsEdit, ...]:
    """The `MakeEdits` of an engine without custom processors."""
    return ()


@dataclass(slots=True)
class RowParams:
    """The parts of a row that are not numbers."""

    sampling_params: SamplingParams
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    stop_token_ids: tuple[int, ...]  # whatever would end the request: EOS included if it counts
    custom_edits: tuple[LogitsEdit, ...] = ()

    @property
    def edits_tokens(self) -> bool:
        """Whether its logits are edited before it samples, by more than penalties."""
        params = self.sampling_params
        return bool(
            params.logit_bias
            or params.allowed_token_ids is not None
            or self.bad_words_token_ids
            or params.min_tokens
            or self.custom_edits
        )

    @property
    def reads_output(self) -> bool:
        """Whether these edits, or penalties, look at the tokens before, drafts among them."""
        return bool(
            self.sampling_params.needs_token_counts
            or self.custom_edits
            or any(len(word) > 1 for word in self.bad_words_token_ids)
        )


class RequestStates:
    """Struct of arrays, host side. `R_max` rows of at most `max_model_len` tokens."""

    def __init__(
        self,
        max_num_requests: int,
        max_model_len: int,
        block_size: int,
        make_edits: MakeEdits = no_edits,
    ):
        self.max_num_requests = max_num_requests
        self.max_model_len = max_model_len
        self.block_size = block_size
        self._make_edits = make_edits
        max_blocks = -(-max_model_len // block_size)
        # Untouched pages of these cost no memory, so the sizes are simply the worst case.
        self.token_ids = np.zeros((max_num_requests, max_model_len + 1), np.int32)
        self.block_table = np.zeros((max_num_requests, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_requests, np.int32)
        self.num_tokens = np.zeros(max_num_requests, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_requests, np.int32)
        self.num_computed_tokens = np.zeros(max_num_requests, np.int32)
        self.params: list[RowParams | None] = [None] * max_num_requests
        # What a whole step's rows are sampled by, without a look at `params`.
        self.draws = np.zeros((max_num_requests, 4))  # temperature (0: greedy), top_p, min_p, top_k
        self.seeds = np.zeros(max_num_requests, np.int64)
        self.num_logprobs = np.full(max_num_requests, NO_LOGPROBS, np.int32)  # -1: all of them
        self.wants_prompt_logprobs = np.zeros(max_num_requests, np.bool_)
        self.edits_tokens = np.zeros(max_num_requests, np.bool_)
        self.reads_output = np.zeros(max_num_requests, np.bool_)
        self.is_penalised = np.zeros(max_num_requests, np.bool_)
        self.penalties = np.zeros((max_num_requests, 3))  # repetition, frequency, presence
        self.num_verifications = np.zeros(max_num_requests, np.int64)  # steps that sampled
        # By row, where the acceptance rule asks for it: [k, V] float32, what the drafts proposed
        # last were drawn from.
        self.draft_probs: dict[int, Tensor] = {}
        self.row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_requests - 1, -1, -1))

    def apply(self, plan: StepPlan) -> None:
        """Forget, admit and extend rows as the plan says; put its drafts behind known tokens."""
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            row = self.row_of.pop(request_id)
            self.params[row] = None
            self.draft_probs.pop(row, None)
            self._free_rows.append(row)
        for new in plan.new_requests:
            self._admit(new)
        for request_id, block_ids in plan.new_block_ids.items():
            self._append_blocks(self.row_of[request_id], block_ids)
        for request_id, num_computed in plan.num_computed_tokens.items():
            row = self.row_of[request_id]
            known = self.num_computed_tokens[row]
            # More than we computed: the new blocks came with the KV of others.
            assert known <= num_computed, f"{request_id}: computed {known}, planned {num_computed}"
            self.num_computed_tokens[row] = num_computed
        for request_id, draft_ids in plan.draft_token_ids.items():
            self.put_drafts(self.row_of[request_id], draft_ids)

    def _admit(self, new: NewRequest) -> None:
        row = self._free_rows.pop()
        self.row_of[new.request_id] = row
        num_tokens = len(new.token_ids)
        self.token_ids[row, :num_tokens] = new.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.num_computed_tokens[row] = new.num_computed_tokens
        self.num_verifications[row] = new.num_verifications
        self.num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        params = new.sampling_params
        eos = () if params.ignore_eos else new.eos_token_ids
        edits = self._make_edits(params, new.token_ids[: new.num_prompt_tokens])
        rest = RowParams(params, new.bad_words_token_ids, params.stop_token_ids + eos, edits)
        self.params[row] = rest
        temperature = 0.0 if params.is_greedy else params.temperature
        self.draws[row] = temperature, params.top_p, params.min_p, params.top_k
        self.seeds[row] = params.seed or 0  # a greedy row may have none
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.wants_prompt_logprobs[row] = params.prompt_logprobs is not None
        self.edits_tokens[row] = rest.edits_tokens
        self.reads_output[row] = rest.reads_output
        self.is_penalised[row] = params.needs_token_counts
        self.penalties[row] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)

    def commit(self, row: int, num_scheduled: int, num_drafts: int, token_ids: list[int]) -> None:
        """One request's result: `token_ids` are accepted drafts and one more, or [] mid-prompt.

        KV of rejected drafts stays in its slots, uncounted, until the next step overwrites it.
        """
        num_rejected = num_drafts + 1 - len(token_ids) if token_ids else 0
        self.num_computed_tokens[row] += num_scheduled - num_rejected
        start = self.num_tokens[row]
        self.token_ids[row, start : start + len(token_ids)] = token_ids
        self.num_tokens[row] = start + len(token_ids)
        if token_ids:
            self.num_verifications[row] += 1
            self.draft_probs.pop(row, None)

    def most_drafts(self, row: int) -> int:
        """Guesses that a model can make behind the known tokens: it writes KV from the newest of
        them on, of all guesses but the last, and these slots must be the row's own."""
        num_slots = min(int(self.num_blocks[row]) * self.block_size, self.max_model_len)
        return max(0, num_slots - int(self.num_tokens[row]) + 1)

    def put_drafts(self, row: int, token_ids: list[int], first: int = 0) -> None:
        """Drafts `first` and on: whoever samples behind them sees them as known."""
        start = self.num_tokens[row] + first
        self.token_ids[row, start : start + len(token_ids)] = token_ids

    def keep_draft_probs(self, row: int, probs: Tensor) -> None:
        """Until the drafts are verified: [k, V] float32, see `draft_probs`."""
        self.draft_probs[row] = probs

    def row_params(self, row: int) -> RowParams:
        params = self.params[row]
        assert params is not None
        return params
