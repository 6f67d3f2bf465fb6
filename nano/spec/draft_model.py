"""DraftModel: an independent small model that shares the target's blocks and catches up lazily.

Its KV layers lie in the same blocks as the target's, so a block id means the same tokens to both:
prefix hits, preemption and freeing cover the drafts. But it computes nothing until drafts are
wanted, so which blocks hold its KV is for it to know:

    _rows[row]           leading tokens of the row whose draft KV is there, and what was fed behind
    _is_valid[block_id]  draft KV of all tokens of the block is there

A hole costs the time to fill it, or drafts that are not made; never correctness.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nano.kv_spec import LayerKVSpec
from nano.model_input.device_drafts import DeviceDrafts
from nano.model_input.request_states import RequestStates
from nano.spec.draft_passes import RowWork, draft_ahead
from nano.spec.drafting_model import DraftingModel
from nano.spec.proposer import ModelDrafts, ModelProposer
from nano.step import StepPlan

_NUM_NEW = 2  # tokens that a step leaves to read: its own and, if all were right, the last draft


@dataclass(slots=True)
class _Ingested:
    num_tokens: int = 0  # leading known tokens with draft KV
    guesses: DeviceDrafts | None = None  # fed behind them, but for the last: right ones are kept


class DraftModel(ModelProposer):
    """Guesses with another model of the same vocabulary.

    Past the model's own context length a request gets no drafts; others are not touched by that.
    Rows that lack more tokens than one pass takes catch up over several steps.
    """

    query_lens = (1, _NUM_NEW)  # behind a step whose drafts were all right, every row reads two

    def __init__(self, layers: list[LayerKVSpec], num_lookahead_tokens: int, block_size: int):
        self.num_lookahead_tokens = num_lookahead_tokens
        self._layers = layers
        self._block_size = block_size
        self._rows: dict[int, _Ingested] = {}

    def kv_layers(self) -> list[LayerKVSpec]:
        return self._layers

    def bind(self, drafting: DraftingModel, num_blocks: int) -> None:
        """See `ModelProposer`; the context holds caches of its own over the same blocks."""
        self._drafting = drafting
        self._is_valid = np.zeros(num_blocks, np.bool_)

    def update(self, plan: StepPlan, states: RequestStates) -> None:
        for new in plan.new_requests:
            row = states.row_of[new.request_id]
            self._rows[row] = _Ingested()
            self._take_blocks(states, row, 0)
        for request_id, block_ids in plan.new_block_ids.items():
            row = states.row_of[request_id]
            self._take_blocks(states, row, int(states.num_blocks[row]) - len(block_ids))

    def _take_blocks(self, states: RequestStates, row: int, first: int) -> None:
        """The row's blocks from index `first` on are new to it: prefix hits, or to be filled."""
        blocks = states.block_table[row, : states.num_blocks[row]]
        num_hits = int(states.num_computed_tokens[row]) // self._block_size
        self._is_valid[blocks[max(first, num_hits) :]] = False
        ingested = self._rows[row]
        index = ingested.num_tokens // self._block_size
        while index < num_hits and self._is_valid[blocks[index]]:
            index += 1
            ingested.num_tokens = index * self._block_size
            ingested.guesses = None

    def propose(
        self, states: RequestStates, rows: Sequence[int], num_tokens: Sequence[int]
    ) -> ModelDrafts:
        drafting, room = self._drafting, self._drafting.max_num_tokens
        num_caught_up = 0
        work, place = [], []
        for i, (row, wanted) in enumerate(zip(rows, num_tokens)):
            num_known = int(states.num_tokens[row])
            start = self._settle(states, row, num_known)
            # The last draft is never fed, so it may stand one past the end of the context.
            num_drafts = min(
                wanted, drafting.max_model_len - num_known + 1, states.most_drafts(row)
            )
            if num_drafts < 1 or not room:
                continue
            stop = min(num_known, start + room)
            room -= stop - start
            if stop - start > _NUM_NEW:
                num_caught_up += stop - start
            work.append(RowWork(row, start, stop, num_drafts if stop == num_known else 0))
            place.append(i)
        found = draft_ahead(drafting, states, work)
        drafts = ModelDrafts(
            [None] * len(rows),
            [None] * len(rows),
            found.num_passes,
            found.num_pass_tokens,
            num_caught_up,
        )
        for i, done, made, probs in zip(place, work, found.made, found.probs):
            drafts.made[i], drafts.probs[i] = made, probs
            self._extend(states, done.row, done.stop)
            self._rows[done.row].guesses = made
        return drafts

    def _settle(self, states: RequestStates, row: int, num_known: int) -> int:
        """Tokens whose draft KV is there, at most all but the newest: accepted guesses have it."""
        ingested = self._rows[row]
        stop = ingested.num_tokens
        for token_id in ingested.guesses.read()[:-1] if ingested.guesses is not None else ():
            if stop >= num_known - 1 or states.token_ids[row, stop] != token_id:
                break
            stop += 1
        ingested.guesses = None
        self._extend(states, row, min(stop, num_known - 1))
        return ingested.num_tokens

    def _extend(self, states: RequestStates, row: int, num_tokens: int) -> None:
        """Draft KV of the first `num_tokens` tokens is there: so it is of the blocks they fill."""
        ingested = self._rows[row]
        full = slice(ingested.num_tokens // self._block_size, num_tokens // self._block_size)
        self._is_valid[states.block_table[row, full]] = True
        ingested.num_tokens = num_tokens
