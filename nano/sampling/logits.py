"""Edits of logits that concern single tokens: allowed ids, bad words, min_tokens, bias, penalties.

Each logits row is edited alone, from the tokens known when it samples: a drafted row sees the
drafts before it as accepted. The order is vLLM's, as written in `edit_row`, penalties last.
"""

import numpy as np
import torch
from torch import Tensor

from nano.batch.input_batch import LogitsRows
from nano.batch.request_states import RequestStates, RowParams
from nano.sampling.backend import SamplingBackend

_BANNED = float("-inf")


def edit_logits(
    logits: Tensor,
    rows: LogitsRows,
    states: RequestStates,
    mask: Tensor | None,
    backend: SamplingBackend,
) -> Tensor:
    """The edited logits; the input is left as it is (raw logprobs read it).

    logits: [L, V]. mask: [L, V] bool, True where a token may be drawn, or None for all.
    """
    edits_tokens, is_penalised = states.edits_tokens[rows.row], states.is_penalised[rows.row]
    if mask is None and not edits_tokens.any() and not is_penalised.any():
        return logits
    edited = logits.clone()
    if mask is not None:
        edited.masked_fill_(~mask, _BANNED)
    for i in edits_tokens.nonzero()[0]:
        row = rows.row[i]
        output = states.token_ids[row, states.num_prompt_tokens[row] : rows.num_known[i]]
        edit_row(edited[i], states.row_params(row), output)
    if is_penalised.any():
        backend.penalise(edited, is_penalised.nonzero()[0], rows, states)
    return edited


def edit_row(logits: Tensor, params: RowParams, output: np.ndarray) -> None:
    """Edit one row [V] in place, all but penalties. output: int32, generated so far."""
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


def _ends_with(tokens: np.ndarray, ending: list[int]) -> bool:
    return not ending or tokens[-len(ending) :].tolist() == ending
