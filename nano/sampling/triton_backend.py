"""Sampling on GPUs by our own Triton kernels: a step's rows in three launches.

L rows of V logits.
"""

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from nano.model_input.input_batch import LogitsRows
from nano.sampling.backend import DrawTable
from nano.sampling.torch_batch_backend import TorchBatchSampling

CHUNK = 2048  # logits per program


class TritonSampling(TorchBatchSampling):
    """float32. Noise is made where it is used, over the vocabulary; a row knows of no other.

    Rows with top_k, top_p or min_p have their cuts found by torch, and are raced here with them.
    Penalties and log probabilities are torch's. The match rule compares the tokens of a step on
    the host (`sampler.accept`), which has to read them anyway.
    """

    name = "triton"

    @classmethod
    def is_available(cls, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.float32 and device.type == "cuda" and find_spec("triton") is not None

    def draw(
        self, logits: Tensor, rows: LogitsRows, table: DrawTable, processed: Tensor | None
    ) -> Tensor:
        from nano.sampling import triton_kernels as kernels

        draws, seeds = table.draws[rows.row], table.seeds[rows.row]
        num_rows, vocab_size = logits.shape
        assert logits.stride(1) == 1, logits.stride()
        assert processed is None or processed.stride(1) == 1
        num_chunks = -(-vocab_size // CHUNK)
        padded_chunks = 1 << (num_chunks - 1).bit_length()
        grid = (num_rows, num_chunks)
        temperatures = self.transfers.to_device(draws[:, 0].astype(np.float32))
        # Tensors of their own: of parts of one some would lie off 16 bytes with some numbers of
        # rows, and Triton would compile for that in the middle of a step.
        best_values, race_values = logits.new_empty(grid), logits.new_empty(grid)
        best_ids, race_ids = (logits.new_empty(grid, dtype=torch.int32) for _ in range(2))
        kernels.best_of_chunks[grid](
            logits, best_values, best_ids, logits.stride(0), vocab_size, CHUNK=CHUNK
        )
        cuts = self.find_cuts(logits, best_values.amax(1), draws, temperatures)
        kernels.race_of_chunks[grid](
            logits,
            best_values,
            temperatures,
            cuts,
            self.transfers.to_device(seeds),
            self.transfers.to_device(rows.num_known),
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
