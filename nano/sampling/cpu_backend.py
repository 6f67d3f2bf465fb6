"""Sampling by our own kernels: all rows of a step in one call, on all threads."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.native.build import load_ops
from nano.sampling.backend import DrawTable, LogprobTensors, SamplingBackend

SOURCE = Path(__file__).with_name("cpu_sampling.cpp")


class CpuSampling(SamplingBackend):
    """float32. A row's results are the same bits in any batch and on any number of threads."""

    name = "cpu"

    @classmethod
    def is_available(cls, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.float32 and device.type == "cpu" and load_ops(SOURCE)

    def penalise(
        self, logits: Tensor, index: np.ndarray, rows: LogitsRows, states: RequestStates
    ) -> None:
        torch.ops.nano.penalise_rows(
            logits,
            torch.from_numpy(index),
            torch.from_numpy(rows.row),
            torch.from_numpy(rows.num_known),
            torch.from_numpy(states.token_ids),
            torch.from_numpy(states.num_prompt_tokens),
            torch.from_numpy(states.penalties),
        )

    def draw(
        self, logits: Tensor, rows: LogitsRows, table: DrawTable, processed: Tensor | None
    ) -> Tensor:
        tokens: Tensor = torch.ops.nano.sample_rows(
            logits,
            torch.from_numpy(rows.row),
            torch.from_numpy(rows.num_known),
            torch.from_numpy(table.draws),
            torch.from_numpy(table.seeds),
            processed,
        )
        return tokens

    def gather_logprobs(
        self, logits: Tensor, index: Tensor, token_ids: Tensor, num_top: int
    ) -> LogprobTensors:
        return LogprobTensors(*torch.ops.nano.gather_logprobs(logits, index, token_ids, num_top))
