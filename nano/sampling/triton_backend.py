"""Sampling on GPUs by our own Triton kernels: a step's rows in three launches.

L rows of V logits.
"""

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from nano.model_input.input_batch import LogitsRows
from nano.sampling.backend import DrawTable
from nano.sampling.torch_backend import TorchSampling
from nano.sampling.truncation import survivors

CHUNK = 2048  # logits per program


class TritonSampling(TorchSampling):
    """float32. Noise is made where it is used, over the vocabulary; a row knows of no other.

    Rows with top_k, top_p or min_p have their cut found by torch, row by row as in its twin, and
    are raced here with it. Penalties and log probabilities are torch's. The match rule compares the
    tokens of a step on the host (`sampler.accept`), which has to read them anyway.
    """

    name = "triton"

    @classmethod
    def is_available(cls, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.float32 and device.type == "cuda" and find_spec("triton") is not None

    def draw(
        self, logits: Tensor, rows: LogitsRows, table: DrawTable, processed: Tensor | None
    ) -> list[int]:
        draws, seeds = table.draws[rows.row], table.seeds[rows.row]
        tokens = self.launch(logits, draws, seeds, rows.num_known, processed)
        return tokens.tolist()

    def launch(
        self,
        logits: Tensor,
        draws: np.ndarray,
        seeds: np.ndarray,
        positions: np.ndarray,
        processed: Tensor | None = None,
    ) -> Tensor:
        """Queue the draw of all rows; the result, [L] int64, is on the device.

        draws: [L, 4] float64, as in `DrawTable`; seeds, positions: [L] int64.
        """
        from nano.sampling import triton_kernels as kernels

        num_rows, vocab_size = logits.shape
        assert logits.stride(1) == 1, logits.stride()
        assert processed is None or processed.stride(1) == 1
        num_chunks = -(-vocab_size // CHUNK)
        padded_chunks = 1 << (num_chunks - 1).bit_length()
        grid = (num_rows, num_chunks)
        keys = torch.from_numpy(np.stack([seeds, positions])).to(logits.device)
        temperatures = torch.from_numpy(draws[:, 0].astype(np.float32)).to(logits.device)
        best_values, race_values = logits.new_empty(2, *grid)
        best_ids, race_ids = logits.new_empty(2, *grid, dtype=torch.int32)
        kernels.best_of_chunks[grid](
            logits, best_values, best_ids, logits.stride(0), vocab_size, CHUNK=CHUNK
        )
        kernels.race_of_chunks[grid](
            logits,
            best_values,
            temperatures,
            _cuts(logits, best_values, draws, temperatures),
            *keys,
            race_values,
            race_ids,
            logits if processed is None else processed,
            logits.stride(0),
            0 if processed is None else processed.stride(0),
            vocab_size,
            num_chunks,
            CHUNK=CHUNK,
            PADDED_CHUNKS=padded_chunks,
            IS_PROCESSED_WANTED=processed is not None,
        )
        tokens = logits.new_empty(num_rows, dtype=torch.int64)
        kernels.winners[(num_rows,)](
            best_values,
            best_ids,
            race_values,
            race_ids,
            temperatures,
            tokens,
            num_chunks,
            PADDED_CHUNKS=padded_chunks,
        )
        return tokens


def _cuts(logits: Tensor, best_values: Tensor, draws: np.ndarray, temperatures: Tensor) -> Tensor:
    """[L] float32: the lowest scaled logit that truncation keeps in each row, -inf if it keeps all.

    best_values: [L, C]. Divides by a tensor: by a number, torch multiplies with its reciprocal on
    CUDA, and the cut could fall on the wrong side of the kernel's own quotient.
    """
    cuts = logits.new_full((len(logits),), -torch.inf)
    is_truncated = (draws[:, 1] < 1) | (draws[:, 2] > 0) | (draws[:, 3] > 0)
    for i in np.flatnonzero(is_truncated & (draws[:, 0] > 0)):
        best = best_values[i].max()
        scaled = (logits[i] - best) / temperatures[i]
        scaled = torch.where(best.isfinite(), scaled, 0.0)  # a row that gives no token has no cut
        _, top_p, min_p, top_k = draws[i].tolist()
        mask = survivors(scaled, top_k=int(top_k), top_p=top_p, min_p=min_p)
        if mask is not None:
            cuts[i] = scaled.masked_fill(~mask, torch.inf).min()
    return cuts
