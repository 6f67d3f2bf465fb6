"""Edits of logits before anything is drawn from them.

Each logits row is edited alone, from the tokens known when it samples: a drafted row sees the
drafts before it as accepted. The order is vLLM's:
  1. a grammar's mask
  2. allowed_token_ids, bad_words, min_tokens, logit_bias
  3. custom logits processors, all of them here, as they are listed  (logits_processor.py)
  4. repetition, frequency and presence penalties
Temperature and truncation come after. (vLLM runs processors that call themselves argmax-invariant
between these two.)

Which tokens are edited follows from what the host knows, so nothing waits for a device here but
custom processors, whose rows are looked at.
"""

import numpy as np
import torch
from torch import Tensor

from nano.device import Transfers
from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import LogitsEdit, RequestStates, RowParams
from nano.sampling.backend import SamplingBackend
from nano.sampling.logits_processor import ProcessorFailed

_BANNED = float("-inf")


def edit_logits(
    logits: Tensor,
    rows: LogitsRows,
    states: RequestStates,
    mask: Tensor | None,
    backend: SamplingBackend,
) -> tuple[Tensor, dict[int, str]]:
    """The edited logits; the input is left as it is (raw logprobs read it).

    logits: [L, V]. mask: [L, V] bool, True where a token may be drawn, or None for all. Rows that
    a custom processor failed at are NaN; the second result says why, by row.
    """
    edits_tokens, is_penalised = states.edits_tokens[rows.row], states.is_penalised[rows.row]
    if mask is None and not edits_tokens.any() and not is_penalised.any():
        return logits, {}
    errors: dict[int, str] = {}
    edited = logits.clone(memory_format=torch.contiguous_format)
    if mask is not None:
        edited.masked_fill_(~mask, _BANNED)
    if edits_tokens.any():
        edits = TokenEdits()
        processed: dict[int, tuple[LogitsEdit, ...]] = {}
        for i in edits_tokens.nonzero()[0].tolist():
            params = states.row_params(rows.row[i])
            edits.add(i, params, _output(states, rows, i))
            if params.custom_edits and rows.num_known[i] >= states.num_tokens[rows.row[i]]:
                processed[i] = params.custom_edits  # other rows are amid a prompt
        edits.apply(edited, backend.transfers)
        for i, custom_edits in processed.items():
            try:
                edit_row_by(custom_edits, edited[i], _output(states, rows, i))
            except ProcessorFailed as error:
                errors[i] = str(error)
                edited[i].fill_(torch.nan)
    if is_penalised.any():
        backend.penalise(edited, is_penalised.nonzero()[0], rows, states)
    return edited, errors


class TokenEdits:
    """Step 2 of the list, for all rows at once. A cell is a row and a token."""

    def __init__(self) -> None:
        self._restricted: list[int] = []  # rows of which only the cells `_allowed` are left
        self._allowed: list[tuple[int, int]] = []
        self._banned: list[tuple[int, int]] = []
        self._biased: list[tuple[int, int]] = []
        self._biases: list[float] = []

    def add(self, i: int, params: RowParams, output: np.ndarray) -> None:
        """What the parameters ask of row i. output: int32, generated so far."""
        sampling = params.sampling_params
        if sampling.allowed_token_ids is not None:
            self._restricted.append(i)
            self._allowed += [(i, token_id) for token_id in sampling.allowed_token_ids]
        for word in params.bad_words_token_ids:
            *beginning, last = word
            if len(beginning) <= len(output) and _ends_with(output, beginning):
                self._banned.append((i, last))
        if len(output) < sampling.min_tokens:
            self._banned += [(i, token_id) for token_id in params.stop_token_ids]
        if sampling.logit_bias:
            self._biased += [(i, token_id) for token_id in sampling.logit_bias]
            self._biases += sampling.logit_bias.values()

    def apply(self, logits: Tensor, transfers: Transfers) -> None:
        """logits: [L, V], in place."""
        if self._restricted:
            cells = _to_device(self._allowed, transfers)
            kept = logits[cells]
            restricted = transfers.to_device(np.array(self._restricted))
            logits.index_fill_(0, restricted, _BANNED).index_put_(cells, kept)
        if self._banned:
            banned = logits.new_full((), _BANNED)
            logits.index_put_(_to_device(self._banned, transfers), banned)
        if self._biased:
            cells = _to_device(self._biased, transfers)
            biases = transfers.to_device(np.array(self._biases)).to(logits.dtype)
            logits.index_put_(cells, logits[cells] + biases)


def edit_row_by(edits: tuple[LogitsEdit, ...], logits: Tensor, output: np.ndarray) -> None:
    """Let each of `edits` edit one row [V], in place. Raises `ProcessorFailed`."""
    for edit in edits:
        # Copies: nothing that a processor does to them can reach other rows, or another processor.
        logits.copy_(edit(output.tolist(), logits.clone()))


def _output(states: RequestStates, rows: LogitsRows, i: int) -> np.ndarray:
    """int32: what row i looks back on as generated."""
    row = rows.row[i]
    return states.token_ids[row, states.num_prompt_tokens[row] : rows.num_known[i]]


def _to_device(cells: list[tuple[int, int]], transfers: Transfers) -> tuple[Tensor, Tensor]:
    """Row and token indices, [n] int64 both."""
    row, token_id = transfers.to_device(np.array(cells, np.int64).reshape(-1, 2).T)
    return row, token_id


def _ends_with(tokens: np.ndarray, ending: list[int]) -> bool:
    return not ending or tokens[-len(ending) :].tolist() == ending
