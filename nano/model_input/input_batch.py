"""InputBatch: the tensors of one step, gathered from RequestStates. Built each step, never kept.

T tokens of R requests; L logits rows, `num_drafts + 1` for every request, and P that predict known
prompt tokens. A request whose prompt goes on discards its row: a few wasted lm_head rows buy one
code path.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nano.attention.backend import AttentionMetadata
from nano.device import Device
from nano.model_input.device_drafts import DeviceDrafts, DraftTable, fed
from nano.model_input.request_states import RequestStates
from nano.step import StepPlan


@dataclass(slots=True)
class LogitsRows:
    """Hidden states that are turned into logits, and the tokens each may look back on."""

    row: np.ndarray  # [L] int64 host: RequestStates row
    # [L] int64 host: known tokens when this row samples, earlier drafts counted as accepted. It is
    # also the absolute position of the token that is sampled.
    num_known: np.ndarray

    def chunk(self, start: int, end: int) -> "LogitsRows":
        return LogitsRows(self.row[start:end], self.num_known[start:end])


@dataclass(slots=True)
class StepTokens:
    """The tokens of one pass of a model, ragged over its R requests."""

    input_ids: Tensor  # [T] int32 device
    positions: Tensor  # [T] int64 device
    attention: AttentionMetadata


@dataclass(slots=True)
class InputBatch:
    """One step's inputs. Batch order is short queries first; it says nothing about rows."""

    request_ids: list[str]  # R, in batch order
    rows: np.ndarray  # [R] int64 host
    num_scheduled: np.ndarray  # [R] int32 host
    num_drafts: np.ndarray  # [R] int32 host
    is_sampling: np.ndarray  # [R] bool host: the step reaches the end of the known tokens
    input_ids: Tensor  # [T] int32 device
    positions: Tensor  # [T] int64 device
    output_rows: Tensor  # [L + P] int64 device: whose hidden states are wanted, of the T tokens
    logits_start: np.ndarray  # [R + 1] int64 host: request i owns logits rows start[i]:start[i+1]
    logits: LogitsRows  # of output_rows[:L]
    prompt_logits: LogitsRows | None  # of output_rows[L:]; None: nobody asked
    attention: AttentionMetadata

    @property
    def num_requests(self) -> int:
        return len(self.request_ids)


_NO_DRAFTS: Mapping[str, DeviceDrafts] = {}
_NO_ROWS = np.empty(0, np.int64)


class InputBatchBuilder:
    """Builds the step's InputBatch with numpy, into buffers allocated once."""

    def __init__(
        self, states: RequestStates, device: Device, block_size: int, max_num_tokens: int
    ) -> None:
        self.states = states
        self.device = device
        self.block_size = block_size
        self._input_ids = np.empty(max_num_tokens, np.int32)
        self._positions = np.empty(max_num_tokens, np.int64)
        self._slots = np.empty(max_num_tokens, np.int64)
        self._block_table = np.empty(states.block_table.shape, np.int32)
        self._arange = np.arange(max_num_tokens, dtype=np.int64)

    def build(self, plan: StepPlan, unread: Mapping[str, DeviceDrafts] = _NO_DRAFTS) -> InputBatch:
        """The inputs of a plan that `states` have applied.

        unread: by request, the drafts for which the plan has DRAFT_ON_DEVICE, as many.
        """
        states = self.states
        order = sorted(plan.num_scheduled_tokens.items(), key=lambda item: item[1])
        request_ids = [request_id for request_id, _ in order]
        rows = np.array([states.row_of[r] for r in request_ids], np.int64)
        num_scheduled = np.array([n for _, n in order], np.int32)
        drafts = plan.draft_token_ids
        num_drafts = np.array([len(drafts.get(r, ())) for r in request_ids], np.int32)

        num_computed = states.num_computed_tokens[rows]
        tokens = self.gather(rows, num_computed, num_scheduled)
        query_start, seq_lens = tokens.attention.query_start_loc, tokens.attention.seq_lens
        if unread:
            self._put_unread(tokens.input_ids, request_ids, query_start[1:], unread)
        num_rows = num_drafts + 1
        logits_start = _starts(num_rows)
        output_rows, logits = self._rows(
            rows, query_start[1:] - num_rows, seq_lens - num_rows, num_rows, logits_start
        )
        prompt_rows, prompt_logits = self._prompt_rows(
            rows, query_start, num_computed, num_scheduled
        )
        if prompt_logits is not None:
            output_rows = np.concatenate((output_rows, prompt_rows))
        return InputBatch(
            request_ids=request_ids,
            rows=rows,
            num_scheduled=num_scheduled,
            num_drafts=num_drafts,
            is_sampling=seq_lens == states.num_tokens[rows] + num_drafts,
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            output_rows=self.device.to_device(output_rows),
            logits_start=logits_start,
            logits=logits,
            prompt_logits=prompt_logits,
            attention=tokens.attention,
        )

    def gather(
        self,
        rows: np.ndarray,
        num_computed: np.ndarray,
        num_scheduled: np.ndarray,
        input_ids: Tensor | None = None,
    ) -> StepTokens:
        """`num_scheduled[i]` tokens of `rows[i]` from position `num_computed[i]` on.

        rows: [R] int64; the others [R] int32, `num_scheduled` rising and at least 1. input_ids:
        [T] int32 device, the tokens themselves; None: whatever the rows hold at those positions,
        drafts included.
        """
        states = self.states
        num_requests = len(rows)
        query_start = np.zeros(num_requests + 1, np.int32)
        num_scheduled.cumsum(out=query_start[1:])
        num_tokens = int(query_start[-1])
        seq_lens = num_computed + num_scheduled

        # Position of every token: its rank in its own query, after what is computed.
        token_rows = rows.repeat(num_scheduled)
        positions = self._positions[:num_tokens]
        np.subtract(
            self._arange[:num_tokens],
            (query_start[:-1] - num_computed).repeat(num_scheduled),
            out=positions,
        )
        to_device = self.device.to_device
        if input_ids is None:
            known = self._input_ids[:num_tokens]
            known[:] = states.token_ids[token_rows, positions]
            input_ids = to_device(known)
        slots = self._slots[:num_tokens]
        block_index, offset = np.divmod(positions, self.block_size)
        np.multiply(states.block_table[token_rows, block_index], self.block_size, out=slots)
        slots += offset

        max_seq_len = int(seq_lens.max())
        max_blocks = -(-max_seq_len // self.block_size)
        block_table = self._block_table[:num_requests, :max_blocks]
        block_table[:] = states.block_table[rows, :max_blocks]

        return StepTokens(
            input_ids=input_ids,
            positions=to_device(positions),
            attention=AttentionMetadata(
                num_requests=num_requests,
                num_tokens=num_tokens,
                max_query_len=int(num_scheduled[-1]),
                max_seq_len=max_seq_len,
                num_decode_requests=int(num_scheduled.searchsorted(1, side="right")),
                query_start_loc=query_start,
                seq_lens=seq_lens,
                block_table=to_device(block_table),
                slot_mapping=to_device(slots),
            ),
        )

    def _put_unread(
        self,
        input_ids: Tensor,
        request_ids: list[str],
        query_ends: np.ndarray,
        unread: Mapping[str, DeviceDrafts],
    ) -> None:
        """Write drafts where `input_ids` [T] has placeholders: one copy for each table."""
        places: dict[DraftTable, list[np.ndarray]] = {}
        for request_id, end in zip(request_ids, query_ends.tolist()):
            drafts = unread.get(request_id)
            if drafts is not None:
                width = drafts.table.token_ids.shape[1]
                place = np.empty((2, len(drafts)), np.int64)  # in input_ids, in the table
                place[0] = np.arange(end - len(drafts), end)
                place[1] = np.arange(len(drafts)) + drafts.index * width
                places.setdefault(drafts.table, []).append(place)
        for table, of_requests in places.items():
            into, source = self.device.to_device(np.concatenate(of_requests, axis=1))
            input_ids.index_copy_(0, into, fed(table.token_ids.view(-1)[source]))

    def _rows(
        self,
        rows: np.ndarray,
        index: np.ndarray,
        position: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
    ) -> tuple[np.ndarray, LogitsRows]:
        """`counts[i]` consecutive rows of request i, from flat `index[i]` at `position[i]`; and
        where they are among the step's tokens."""
        first = starts[:-1]
        rank = self._arange[: starts[-1]]  # over all; a request's own begin at `first`
        return rank + (index - first).repeat(counts), LogitsRows(
            row=rows.repeat(counts), num_known=rank + (position - first + 1).repeat(counts)
        )

    def _prompt_rows(
        self,
        rows: np.ndarray,
        query_start: np.ndarray,
        num_computed: np.ndarray,
        num_scheduled: np.ndarray,
    ) -> tuple[np.ndarray, LogitsRows | None]:
        """Rows whose next token is a prompt token of a request with `prompt_logprobs`."""
        states = self.states
        wanted = states.wants_prompt_logprobs[rows]
        if not wanted.any():
            return _NO_ROWS, None
        last = states.num_prompt_tokens[rows] - 1  # nothing in the prompt follows its last token
        counts = np.clip(last - num_computed, 0, num_scheduled) * wanted
        if not counts.any():
            return _NO_ROWS, None
        return self._rows(rows, query_start[:-1], num_computed, counts, _starts(counts))


def _starts(counts: np.ndarray) -> np.ndarray:
    """[R + 1] int64: where each of R runs of these lengths begins, and where the last one ends."""
    starts = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=starts[1:])
    return starts
