"""Sampling: tokens that this device draws, against the torch twin with the same noise.

Two logarithms may differ in their last place. So where tokens differ, the race between the two is
run again in float64: it must have been that close.
"""

import math

import numpy as np
import torch
from torch import Tensor

from nano.gpu_check.box import Box
from nano.model_input.input_batch import LogitsRows
from nano.sampling.backend import NoiseTable
from nano.sampling.noise import log_exponential
from nano.sampling.select import select_backend
from nano.sampling.torch_backend import TorchSampling

_RACE_BOUND = 1e-4  # of scores up to some hundred: a few of their last places
# temperature, top_p, min_p, top_k
_DRAWS = ((0.0, 1, 0, 0), (1.0, 1, 0, 0), (0.7, 0.9, 0, 0), (1.3, 1, 0, 20), (1.0, 0.95, 0.05, 50))


def check_sampling(box: Box) -> None:
    device = box.device.torch_device
    num_rows, vocab_size = box.sizes.num_sampled_rows, box.sizes.vocab_size
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(device)
    logits[:, vocab_size // 2 :: 7] = -torch.inf  # banned tokens
    table = NoiseTable(
        draws=np.array([_DRAWS[i % len(_DRAWS)] for i in range(num_rows)]),
        seeds=np.arange(num_rows, dtype=np.int64) * 2**40 - 5,
    )
    rows = LogitsRows(
        row=np.arange(num_rows),
        num_known=np.arange(num_rows, dtype=np.int64) * 1000,
    )
    ours = select_backend(torch.float32, device, box.device)
    tokens, expected = (
        torch.as_tensor(backend.draw(logits.clone(), rows, table, None)).cpu()
        for backend in (ours, TorchSampling())
    )
    worst = 0.0
    different = torch.nonzero(tokens != expected).flatten().tolist()
    for row in different:
        worst = max(worst, _distance(logits[row], row, table, rows, tokens[row], expected[row]))
    told = [f"row {row}: {int(tokens[row])}, not {int(expected[row])}" for row in different[:1]]
    box.report.check(
        f"{ours.name} draws as torch does",
        worst <= _RACE_BOUND,
        "".join(told),
        rows=num_rows,
        different=len(different),
        race_gap=worst,
    )


def _distance(
    logits: Tensor, row: int, table: NoiseTable, rows: LogitsRows, ours: Tensor, wanted: Tensor
) -> float:
    """Between the scores of two tokens of one row."""
    temperature = float(table.draws[row, 0])
    ids = torch.stack([ours, wanted]).to(torch.int32)
    scores = logits.cpu().double()[ids.long()]
    if temperature > 0:
        noise = log_exponential(int(table.seeds[row]), int(rows.num_known[row]), ids)
        scores = scores / temperature - noise.double()
    distance = abs(float(scores[0] - scores[1]))
    return math.inf if math.isnan(distance) else distance
