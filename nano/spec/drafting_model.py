"""DraftingModel: a loaded model as a proposer has it, with what a pass of it takes."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nano.attention.op import ForwardContext, forward_context
from nano.compile.artifact import ForwardFn
from nano.device import Transfers
from nano.model_input.input_batch import InputBatchBuilder
from nano.models.decoder import Decoder
from nano.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class DraftingModel:
    """A loaded model, with what it takes to run a pass of it."""

    model: Decoder
    forward: ForwardFn
    context: ForwardContext  # its attention backend and the KV it reads and writes
    builder: InputBatchBuilder
    sampler: Sampler
    max_model_len: int
    max_num_tokens: int  # of one pass

    @property
    def device(self) -> Transfers:
        return self.builder.device

    def run(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """One pass over `counts[i]` tokens of `rows[i]` from `starts[i]` on, as
        `InputBatchBuilder.gather` takes them: hidden states [R, hidden] of each row's last one.

        Writes the KV of all.
        """
        tokens = self.builder.gather(rows, starts, counts, input_ids)
        last = self.device.to_device(tokens.attention.query_start_loc[1:].astype(np.int64) - 1)
        self.context.backend.plan(tokens.attention)
        with forward_context(self.context):
            return self.forward(tokens.input_ids, tokens.positions, last)
