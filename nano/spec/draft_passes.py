"""draft_ahead: run a model ahead of the target. One pass over what it does not know, then one
token at a time, all rows side by side. R rows, k drafts.

The loop of every proposer that runs a model: run, sample, feed back. Under the match rule drafts
are sampled as the target would, with the target's own noise and the request's own parameters, so a
draft is wrong only where the two models disagree (exponential-race coupling: Daliri, Musco, Suresh
2024, arXiv 2408.07978).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    """Guesses for each of `work`, in its order; `token_ids[i]` is [] where there are none.

    Writes guesses behind the known tokens in `states`, and KV for positions up to
    `stop + num_drafts - 2`: the slots must be the row's own.
    """
    drafts = ModelDrafts(
        token_ids=[[] for _ in work], probs=[None] * len(work), num_passes=0, num_pass_tokens=0
    )
    probs: list[list[Tensor]] = [[] for _ in work]
    # Short queries first, as every backend expects them. From the second pass on all are equal.
    active = sorted(range(len(work)), key=lambda i: work[i].stop - work[i].start)
    starts = np.array([work[i].start for i in active], np.int32)
    counts = np.array([work[i].stop - work[i].start for i in active], np.int32)
    index = 0  # of the draft that a pass gives
    while active:
        rows = np.array([work[i].row for i in active], np.int64)
        hidden = drafting.run(rows, starts, counts)
        drafts.num_passes += 1
        drafts.num_pass_tokens += int(counts.sum())
        guessing = [n for n, i in enumerate(active) if work[i].num_drafts > index]
        if not guessing:
            break
        last = counts.cumsum()[guessing] - 1
        known = (starts + counts)[guessing].astype(np.int64)
        logits = drafting.model.compute_logits(hidden[torch.from_numpy(last)])
        token_ids, drawn_from = drafting.sampler.sample_drafts(
            logits, LogitsRows(torch.from_numpy(last), rows[guessing], known), states
        )
        active = [active[n] for n in guessing]
        goes_on = []
        for n, (i, token_id) in enumerate(zip(active, token_ids)):
            if token_id == NO_TOKEN:
                continue
            states.put_draft(work[i].row, index, token_id)
            drafts.token_ids[i].append(token_id)
            if drawn_from is not None and states.draws[work[i].row, 0] > 0:  # a greedy one matches
                probs[i].append(drawn_from[n])
            if index + 1 < work[i].num_drafts:
                goes_on.append(n)
        starts = known[goes_on].astype(np.int32)
        counts = np.ones(len(goes_on), np.int32)
        active = [active[n] for n in goes_on]
        index += 1
    drafts.probs = [torch.stack(rows_) if rows_ else None for rows_ in probs]
    return drafts
