"""Sampling in torch, row by row, in main memory: any dtype. The obvious twin of the kernels."""

import numpy as np
import torch
from torch import Tensor

from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.sampling.backend import NO_TOKEN, DrawTable, LogprobTensors, SamplingBackend
from nano.sampling.noise import log_exponential
from nano.sampling.truncation import survivors

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
        vocab_size = logits.shape[1]
        row, num_known = rows.row[index], rows.num_known[index]
        known = np.concatenate([states.token_ids[r, :n] for r, n in zip(row, num_known)])
        place = np.arange(len(index)).repeat(num_known)  # of each known token's row in `index`
        position = np.arange(len(known)) - (num_known.cumsum() - num_known).repeat(num_known)
        is_output = position >= states.num_prompt_tokens[row][place]
        is_token = (known >= 0) & (known < vocab_size)
        cells = np.stack([place * vocab_size + known, is_output])[:, is_token]

        to_device = self.transfers.to_device
        at = to_device(index)
        penalised = logits.index_select(0, at)
        _penalise(penalised, to_device(cells), to_device(states.penalties[row]))
        logits.index_copy_(0, at, penalised)

    def draw(
        self, logits: Tensor, rows: LogitsRows, table: DrawTable, processed: Tensor | None
    ) -> Tensor:
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
        return torch.tensor(token_ids)

    def gather_logprobs(
        self, logits: Tensor, index: Tensor, token_ids: Tensor, num_top: int
    ) -> LogprobTensors:
        logprobs = torch.log_softmax(logits.index_select(0, index), dim=-1)  # row by row
        chosen = logprobs.gather(1, token_ids[:, None])
        top = logprobs.topk(num_top, dim=1)
        return LogprobTensors(
            token_ids=torch.cat((token_ids[:, None], top.indices), dim=1),
            logprobs=torch.cat((chosen, top.values), dim=1),
            ranks=(logprobs > chosen).sum(dim=1) + 1,
        )


def _race(scaled: Tensor, mask: Tensor | None, seed: int, position: int) -> int:
    """The winner of one row [V], among the tokens of `mask` [V] bool (None: all)."""
    if mask is None or int(mask.sum()) * _SPARSE > mask.numel():
        all_ids = torch.arange(scaled.numel(), dtype=torch.int32, device=scaled.device)
        return int((scaled - log_exponential(seed, position, all_ids)).argmax())
    token_ids = mask.nonzero().squeeze(1)  # few: their noise alone is cheaper, and the same
    noise = log_exponential(seed, position, token_ids.to(torch.int32))
    return int(token_ids[(scaled[token_ids] - noise).argmax()])


def _penalise(logits: Tensor, known: Tensor, penalties: Tensor) -> None:
    """Penalise rows [N, V] in place.

    known: [2, K] int64, for each known token its place in the flat rows, and whether it is output.
    penalties: [N, 3] float64.
    """
    flat = logits.view(-1)
    cells, is_output = known.unbind()
    counts = torch.zeros_like(flat, dtype=torch.int32).index_add_(0, cells, is_output.int())[cells]
    repetition, frequency, presence = penalties.index_select(0, cells // logits.shape[1]).T
    values, repetition = flat[cells], repetition.to(logits.dtype)
    values = torch.where(values > 0, values / repetition, values * repetition)
    drop = (frequency * counts + presence).to(logits.dtype)
    # A token known twice has two entries, of the same value.
    flat.index_put_((cells,), torch.where(counts > 0, values - drop, values))
