"""Sampling in torch, row by row: any dtype and device. The obvious twin of the kernels."""

import numpy as np
import torch
from torch import Tensor

from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.sampling.backend import NO_TOKEN, DrawTable, SamplingBackend
from nano.sampling.noise import log_exponential
from nano.sampling.truncation import survivors
from nano.sampling_params import SamplingParams
from nano.step import TokenLogprobs

_SPARSE = 8  # noise of single tokens costs about this many times its share of a whole row's


class TorchSampling(SamplingBackend):
    """Each row by itself, so nothing about the batch can reach it."""

    name = "torch"

    @classmethod
    def is_available(cls, dtype: torch.dtype, device: torch.device) -> bool:
        return True

    def penalise(
        self, logits: Tensor, index: np.ndarray, rows: LogitsRows, states: RequestStates
    ) -> None:
        for i in index:
            row = rows.row[i]
            num_prompt = states.num_prompt_tokens[row]
            known = states.token_ids[row, : rows.num_known[i]]
            params = states.row_params(row).sampling_params
            _penalise_row(logits[i], params, known, known[num_prompt:])

    def draw(
        self, logits: Tensor, rows: LogitsRows, table: DrawTable, processed: Tensor | None
    ) -> list[int]:
        best_values, best_ids = logits.max(dim=1)  # propagates NaN
        is_usable = torch.isfinite(best_values)
        token_ids = torch.where(is_usable, best_ids, NO_TOKEN).tolist()
        for i, row in enumerate(rows.row):
            temperature, top_p, min_p, top_k = table.draws[row].tolist()
            drawn_from = logits[i]
            if temperature > 0 and token_ids[i] != NO_TOKEN:
                # The best token is moved to zero first: no tiny temperature can overflow it.
                scaled = (drawn_from - drawn_from.max()) / temperature
                mask = survivors(scaled, top_k=int(top_k), top_p=top_p, min_p=min_p)
                drawn_from = scaled if mask is None else scaled.masked_fill_(~mask, -torch.inf)
                key = int(table.seeds[row]), int(rows.num_known[i])
                token_ids[i] = _race(drawn_from, mask, *key)
            if processed is not None:
                processed[i] = drawn_from
        return token_ids

    def gather_logprobs(
        self, logits: Tensor, index: Tensor, token_ids: Tensor, num_top: int
    ) -> TokenLogprobs:
        index, token_ids = index.to(logits.device), token_ids.to(logits.device)
        logprobs = torch.log_softmax(logits[index], dim=-1)  # rows are normalised one by one
        chosen = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > chosen).sum(dim=1) + 1
        top = logprobs.topk(num_top, dim=1)
        return TokenLogprobs(
            token_ids=torch.cat((token_ids[:, None], top.indices), dim=1).tolist(),
            logprobs=torch.cat((chosen, top.values), dim=1).tolist(),
            ranks=ranks.tolist(),
        )


def _race(scaled: Tensor, mask: Tensor | None, seed: int, position: int) -> int:
    """The winner of one row [V], among the tokens of `mask` [V] bool (None: all)."""
    if mask is None or int(mask.sum()) * _SPARSE > mask.numel():
        all_ids = torch.arange(scaled.numel(), dtype=torch.int32, device=scaled.device)
        return int((scaled - log_exponential(seed, position, all_ids)).argmax())
    token_ids = mask.nonzero().squeeze(1)  # few: their noise alone is cheaper, and the same
    noise = log_exponential(seed, position, token_ids.to(torch.int32))
    return int(token_ids[(scaled[token_ids] - noise).argmax()])


def _penalise_row(
    logits: Tensor, params: SamplingParams, known: np.ndarray, output: np.ndarray
) -> None:
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(known)).long()
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        seen_ids, counts = np.unique(output, return_counts=True)
        drop = params.frequency_penalty * counts + params.presence_penalty
        logits[torch.from_numpy(seen_ids).long()] -= torch.from_numpy(drop).to(logits.dtype)
