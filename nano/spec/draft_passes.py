"""draft_ahead: run a model ahead of the target. One pass over what it does not know, then one
token at a time, all rows side by side. R rows, at most K drafts each.

The loop of every proposer that runs a model: run, sample, feed back. Under the match rule drafts
are sampled as the target would, with the target's own noise and the request's own parameters, so a
draft is wrong only where the two models disagree (exponential-race coupling: Daliri, Musco, Suresh
2024, arXiv 2408.07978).

What a pass samples is the next one's input on the device, and the host knows all the rest before
the first: so it queues every pass and waits for none. Only where edits of a row's logits look at
the drafts before it (`RequestStates.reads_output`) does it read each pass.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nano.model_input.device_drafts import DeviceDrafts, DraftTable, fed
from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.sampling.backend import NO_TOKEN
from nano.spec.drafting_model import DraftingModel
from nano.spec.proposer import ModelDrafts


@dataclass(slots=True)
class RowWork:
    """What to do for one row."""

    row: int
    start: int  # known tokens [start, stop) are computed in the first pass; start < stop
    stop: int
    num_drafts: int  # to guess behind `stop`, which then is all that is known; 0: compute only


def draft_ahead(drafting: DraftingModel, states: RequestStates, work: list[RowWork]) -> ModelDrafts:
    """Guesses for each of `work`, in its order.

    Every row makes all passes that it was asked for: behind logits that give no token it goes on
    with token 0. Writes KV for positions up to `stop + num_drafts - 2`: the slots must be the row's
    own.
    """
    drafts = ModelDrafts([None] * len(work), [None] * len(work), num_passes=0, num_pass_tokens=0)
    if not work:
        return drafts
    # Short queries first, as every backend expects them.
    place = np.array([one.stop - one.start for one in work]).argsort(kind="stable")
    rows = np.array([work[i].row for i in place], np.int64)
    starts = np.array([work[i].start for i in place], np.int32)
    counts = np.array([work[i].stop - work[i].start for i in place], np.int32)
    wanted = np.array([work[i].num_drafts for i in place], np.int32)
    hidden = drafting.run(rows, starts, counts)
    drafts.num_passes, drafts.num_pass_tokens = 1, int(counts.sum())
    # From here on whoever guesses more comes first: those who go on are always the first ones.
    guessing = (-wanted).argsort(kind="stable")[: np.count_nonzero(wanted)]
    if not len(guessing):
        return drafts
    place, rows, wanted = place[guessing], rows[guessing], wanted[guessing]
    known = (starts + counts)[guessing].astype(np.int64)
    device = drafting.device
    hidden = hidden[device.to_device(guessing)]
    token_ids = torch.full(
        (len(rows), int(wanted[0])), NO_TOKEN, dtype=torch.int64, device=device.torch_device
    )
    drawn_from: Tensor | None = None  # [R, K, V] float32 probabilities, where a rule asks for them
    for index in range(token_ids.shape[1]):
        num_rows = int(np.count_nonzero(wanted > index))
        rows = rows[:num_rows]
        if index > 0:
            starts, known = known[:num_rows].astype(np.int32), known[:num_rows] + 1
            input_ids = fed(token_ids[:num_rows, index - 1])
            hidden = drafting.run(rows, starts, np.ones(num_rows, np.int32), input_ids)
            drafts.num_passes += 1
            drafts.num_pass_tokens += num_rows
        logits = drafting.model.compute_logits(hidden)
        sampled, probs = drafting.sampler.sample_drafts(logits, LogitsRows(rows, known), states)
        token_ids[:num_rows, index] = sampled
        if probs is not None:
            if drawn_from is None:
                drawn_from = probs.new_empty(*token_ids.shape, probs.shape[1])
            drawn_from[:num_rows, index] = probs
        looks_back = states.reads_output[rows] & (wanted[:num_rows] > index + 1)
        if looks_back.any():
            (seen,) = device.to_host([fed(token_ids[:num_rows, index])]).wait()
            for row, token_id in zip(rows[looks_back].tolist(), seen[looks_back].tolist()):
                states.put_drafts(row, [token_id], index)
    table = DraftTable(device, token_ids)
    for n, i in enumerate(place.tolist()):
        drafts.made[i] = DeviceDrafts(table, n, int(wanted[n]))
        if drawn_from is not None and states.draws[work[i].row, 0] > 0:  # a greedy one matches
            drafts.probs[i] = drawn_from[n, : wanted[n]]
    return drafts
