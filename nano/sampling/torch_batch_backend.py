"""Sampling in torch on a device: all rows of a step at once, and the host looks at nothing.

L rows of V logits.
"""

import numpy as np
import torch
from torch import Tensor

from nano.model_input.input_batch import LogitsRows
from nano.sampling.backend import NO_TOKEN, DrawTable
from nano.sampling.cuts import find_cuts, is_truncated
from nano.sampling.noise import bits_of_keys, keys_of_rows, log_exponential_from_bits
from nano.sampling.torch_backend import TorchSampling


class TorchBatchSampling(TorchSampling):
    """Any dtype. Several times a row's memory; where Triton serves, that is made chunk by chunk."""

    name = "torch-batch"

    @classmethod
    def is_available(cls, dtype: torch.dtype, device: torch.device) -> bool:
        return device.type != "cpu"

    def draw(
        self, logits: Tensor, rows: LogitsRows, table: DrawTable, processed: Tensor | None
    ) -> Tensor:
        draws, seeds = table.draws[rows.row], table.seeds[rows.row]
        best_values, token_ids = logits.max(dim=1)  # propagates NaN
        is_usable = torch.isfinite(best_values)
        drawn_from = logits
        if draws[:, 0].any():
            temperatures = self.transfers.to_device(draws[:, 0]).to(logits.dtype)
            scaled = scale(logits, best_values, temperatures)
            if is_truncated(draws).any():
                cuts = self.find_cuts(logits, best_values, draws, temperatures)
                scaled.masked_fill_(scaled < cuts[:, None], -torch.inf)
            keys = self.transfers.to_device(keys_of_rows(seeds, rows.num_known))
            first, second = keys[:, :, None].unbind()
            ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
            noise = log_exponential_from_bits(bits_of_keys(first, second, ids))
            is_greedy = temperatures == 0
            token_ids = torch.where(is_greedy, token_ids, (scaled - noise).argmax(dim=1))
            drawn_from = torch.where(is_greedy[:, None], logits, scaled)
        if processed is not None:
            processed.copy_(drawn_from)
        return torch.where(is_usable, token_ids, NO_TOKEN)

    def find_cuts(
        self, logits: Tensor, best_values: Tensor, draws: np.ndarray, temperatures: Tensor
    ) -> Tensor:
        """[L]: the lowest scaled logit that each row keeps, -inf where truncation is off.

        best_values, temperatures: [L]; draws: [L, 4]. Only rows that are truncated are looked at.
        """
        cuts = logits.new_full((len(logits),), -torch.inf)
        index = np.flatnonzero(is_truncated(draws))
        if len(index):
            at = self.transfers.to_device(index)
            best = best_values.index_select(0, at)
            scaled = scale(logits.index_select(0, at), best, temperatures.index_select(0, at))
            scaled.masked_fill_(~best.isfinite()[:, None], 0.0)  # it gives no token anyway
            cuts.index_copy_(0, at, find_cuts(scaled, draws[index], self.transfers))
        return cuts


def scale(logits: Tensor, best_values: Tensor, temperatures: Tensor) -> Tensor:
    """[N, V]: (logits - best) / temperature by row; rows of temperature 0 mean nothing.

    Divides by a tensor: by a number, torch multiplies with its reciprocal on CUDA, and a cut could
    fall on the wrong side of a kernel's own quotient.
    """
    return (logits - best_values[:, None]).div_(temperatures[:, None])
