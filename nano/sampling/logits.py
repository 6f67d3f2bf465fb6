"""Edits of logits that concern single tokens: allowed ids, bad words, min_tokens, bias, penalties.

Each logits row is edited alone, from the tokens known when it samples: a drafted row sees the
drafts before it as accepted. The order is vLLM's, as written in `edit_row`.
"""

import numpy as np
import torch
from torch import Tensor

from nano.batch.input_batch import LogitsRows
from nano.batch.request_states import RequestStates, RowParams
from nano.sampling_params import SamplingParams

_BANNED = float("-inf")


def edit_logits(
    logits: Tensor, rows: LogitsRows, states: RequestStates, mask: Tensor | None
) -> Tensor:
    """The edited logits; the input is left as it is (raw logprobs read it).

    logits: [L, V]. mask: [L, V] bool, True where a token may be drawn, or None for all.
    """
    wanted = [i for i, row in enumerate(rows.row) if states.row_params(row).token_edits]
    if not wanted and mask is None:
        return logits
    edited = logits.clone()
    if mask is not None:
        edited.masked_fill_(~mask, _BANNED)
    for i in wanted:
        row = int(rows.row[i])
        num_prompt = int(states.num_prompt_tokens[row])
        known = states.token_ids[row, : rows.num_known[i]]
        edit_row(edited[i], states.row_params(row), known[:num_prompt], known[num_prompt:])
    return edited


def edit_row(logits: Tensor, params: RowParams, prompt: np.ndarray, output: np.ndarray) -> None:
    """Edit one row [V] in place. prompt, output: int32 token ids known so far."""
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
    if sampling.needs_token_counts:
        _penalise(logits, sampling, prompt, output)


def _ends_with(tokens: np.ndarray, ending: list[int]) -> bool:
    return not ending or tokens[-len(ending) :].tolist() == ending


def _penalise(
    logits: Tensor, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray
) -> None:
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.concatenate((prompt, output)))).long()
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(output) and (sampling.frequency_penalty or sampling.presence_penalty):
        seen_ids, counts = np.unique(output, return_counts=True)
        drop = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[torch.from_numpy(seen_ids).long()] -= torch.from_numpy(drop).to(logits.dtype)
