"""Edits of logits before anything is drawn from them.

Each logits row is edited alone, from the tokens known when it samples: a drafted row sees the
drafts before it as accepted. The order is vLLM's:
  1. a grammar's mask
  2. allowed_token_ids, bad_words, min_tokens, logit_bias
  3. custom logits processors, all of them here, as they are listed  (logits_processor.py)
  4. repetition, frequency and presence penalties
Temperature and truncation come after. (vLLM runs processors that call themselves argmax-invariant
between these two.)
"""

import numpy as np
import torch
from torch import Tensor

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
    edited = logits.clone()
    if mask is not None:
        edited.masked_fill_(~mask, _BANNED)
    for i in edits_tokens.nonzero()[0]:
        row = rows.row[i]
        output = states.token_ids[row, states.num_prompt_tokens[row] : rows.num_known[i]]
        params = states.row_params(row)
        edit_row(edited[i], params, output)
        if params.custom_edits and rows.num_known[i] >= states.num_tokens[row]:  # else: mid-prompt
            try:
                edit_row_by(params.custom_edits, edited[i], output)
            except ProcessorFailed as error:
                errors[int(i)] = str(error)
                edited[i] = torch.nan
    if is_penalised.any():
        backend.penalise(edited, is_penalised.nonzero()[0], rows, states)
    return edited, errors


def edit_row(logits: Tensor, params: RowParams, output: np.ndarray) -> None:
    """Edit one row [V] in place, step 2 of the list. output: int32, generated so far."""
    sampling = params.sampling_params
    if sampling.allowed_token_ids is not None:
        allowed = torch.tensor(sampling.allowed_token_ids)
        kept = logits[allowed]
        logits.fill_(_BANNED)
        logits[allowed] = kept
    for word in params.bad_words_token_ids:
        *beginning, last = word
        if len(beginning) <= len(output) and _ends_with(output, beginning):
            logits[last] = _BANNED
    if len(output) < sampling.min_tokens and params.stop_token_ids:
        logits[torch.tensor(params.stop_token_ids)] = _BANNED
    if sampling.logit_bias:
        token_ids = torch.tensor(list(sampling.logit_bias))
        logits[token_ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype)


def edit_row_by(edits: tuple[LogitsEdit, ...], logits: Tensor, output: np.ndarray) -> None:
    """Let each of `edits` edit one row [V], in place. Raises `ProcessorFailed`."""
    for edit in edits:
        # Copies: nothing that a processor does to them can reach other rows, or another processor.
        logits.copy_(edit(output.tolist(), logits.clone()))


def _ends_with(tokens: np.ndarray, ending: list[int]) -> bool:
    return not ending or tokens[-len(ending) :].tolist() == ending
