"""Sampler: logits rows -> tokens, and which drafts those tokens accept.

Order of operations, as in vLLM:
  1. raw logprobs are taken from the model's logits as they are
  2. masks, allowed_token_ids, bad_words, min_tokens, logit_bias, custom processors,
     penalties                                                                   (logits.py)
  3. greedy rows: argmax. The others: temperature, min_p, top_k, top_p  (truncation.py, cuts.py)
  4. an exponential race over what is left                                       (noise.py)
  5. drafts that an acceptance rule judges: its tokens take the place of step 4's  (verification.py)
  6. processed logprobs are taken from what step 4 drew from

Steps 3 and 4 are one call of a backend for all rows: cpu_sampling.cpp, Triton, or torch.
Every row is sampled alone and from its own key, so nothing about the batch can reach it. With
no drafts a request has one row and this is ordinary sampling; there is no second path. Step 5
is there under another rule than match only.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nano.device import HostTransfers, Transfers
from nano.model_input.input_batch import InputBatch, LogitsRows
from nano.model_input.request_states import NO_LOGPROBS, RequestStates
from nano.sampling.acceptance import AcceptanceRule
from nano.sampling.backend import NO_TOKEN, SamplingBackend
from nano.sampling.logits import edit_logits
from nano.sampling.noise import NoiseDomain
from nano.sampling.pending import Pending, all_of
from nano.sampling.select import select_backend
from nano.sampling.verification import draw_by, find_drafted, probabilities, verify
from nano.step import TokenLogprobs

_BAD_LOGITS = "the model produced logits that are not numbers (NaN or infinity) for this request"
_NOTHING_LEFT = "no token may be sampled: the request's own restrictions exclude all of them"


@dataclass(slots=True)
class RowSamples:
    """One token per logits row, and what else was asked of the row."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of one token each
    errors: dict[int, str] = field(default_factory=dict)  # row -> why its token means nothing
    # First row of a request -> drafts that a rule has accepted; without an entry, tokens tell.
    num_accepted: dict[int, int] = field(default_factory=dict)

    def extend(self, other: "RowSamples") -> None:
        offset = len(self.token_ids)
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.errors.update({offset + row: why for row, why in other.errors.items()})
        self.num_accepted.update({offset + row: n for row, n in other.num_accepted.items()})


@dataclass(slots=True)
class SamplerOutput:
    """What one step sampled, per request of the batch."""

    token_ids: list[list[int]]  # accepted drafts and one more; [] for a request that goes on
    logprobs: dict[str, TokenLogprobs]
    errors: dict[str, str]


class Sampler:
    """Turns logits into tokens. Nothing of one call can be seen in the next.

    `queue_...` and `sample_drafts` give work to the device and look at nothing of it: what comes of
    a step is read at once. Only acceptance rules other than the match rule, and custom logits
    processors, make the host wait in between.
    """

    def __init__(
        self,
        logprobs_mode: str = "raw_logprobs",
        backend: SamplingBackend | None = None,
        rule: AcceptanceRule | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        """backend: None is the best one for the logits that come. rule: None is the match rule.

        transfers: to where the logits are; None is main memory.
        """
        self.takes_raw_logprobs = logprobs_mode == "raw_logprobs"
        self.backend = backend
        self.rule = rule
        self.transfers = transfers or HostTransfers()
        self._selected: dict[torch.dtype, SamplingBackend] = {}
        self.backend_for(torch.float32)  # what must be compiled is compiled now, not in a step

    def backend_for(self, dtype: torch.dtype) -> SamplingBackend:
        """What samples from logits of `dtype`."""
        if self.backend is not None:
            return self.backend
        if dtype not in self._selected:
            device = self.transfers.torch_device
            self._selected[dtype] = select_backend(dtype, device, self.transfers)
        return self._selected[dtype]

    def sample_rows(
        self, logits: Tensor, rows: LogitsRows, states: RequestStates, mask: Tensor | None = None
    ) -> RowSamples:
        """`queue_rows`, and wait for it."""
        return self.queue_rows(logits, rows, states, mask).read(self.transfers)

    def queue_rows(
        self, logits: Tensor, rows: LogitsRows, states: RequestStates, mask: Tensor | None = None
    ) -> Pending[RowSamples]:
        """Sample every row. logits: [L, V] float32 or float64, not modified.

        rows: those of whole requests, each one's side by side. mask: [L, V] bool, True where a
        grammar allows the token, or None.
        """
        backend = self.backend_for(logits.dtype)
        num_logprobs = states.num_logprobs[rows.row]
        wants_logprobs = bool((num_logprobs != NO_LOGPROBS).any())
        edited, errors = edit_logits(logits, rows, states, mask, backend)
        drafted = None if self.rule is None else find_drafted(self.rule, rows, states)
        source, processed = logits, None
        if drafted is not None or (wants_logprobs and not self.takes_raw_logprobs):
            processed = logits.new_empty(logits.shape)
        if processed is not None and not self.takes_raw_logprobs:
            source = processed
        token_ids = backend.draw(edited, rows, states, processed)
        num_accepted: dict[int, int] = {}
        if drafted is not None:
            assert self.rule is not None
            assert processed is not None
            judged = Pending([token_ids], _only_list).read(self.transfers)
            num_accepted = verify(self.rule, backend, drafted, rows, states, processed, judged)
            token_ids = self.transfers.to_device(np.array(judged))
        asked = {
            num_top: np.flatnonzero(num_logprobs == num_top)
            for num_top in set(num_logprobs.tolist()) - {NO_LOGPROBS}
        }
        parts: list[Pending[Any]] = [
            Pending([token_ids], _only_list),
            _is_usable(logits, edited),
            *(self.queue_logprobs(source, at, token_ids, n) for n, at in asked.items()),
        ]

        def collect(values: list[Any]) -> RowSamples:
            ids, is_usable, *records = values
            samples = RowSamples(ids, [None] * len(ids), errors, num_accepted)
            if NO_TOKEN in ids:
                _explain(samples, is_usable)
            for index, record in zip(asked.values(), records):
                _put_logprobs(samples, index, record)
            return samples

        return all_of(parts).then(collect)

    def queue_logprobs(
        self, logits: Tensor, index: np.ndarray, token_ids: Tensor, num_top: int
    ) -> Pending[TokenLogprobs]:
        """Of the rows `index` [N] of `logits` [L, V]: logprobs of their tokens and the best.

        index: int64, rising; token_ids: [L] int64, NO_TOKEN stands for anything; num_top: -1 is
        all. A row's figures depend on the row alone.
        """
        at = self.transfers.to_device(index)
        vocab_size = logits.shape[1]
        found = self.backend_for(logits.dtype).gather_logprobs(
            logits,
            at,
            token_ids.index_select(0, at).clamp_(min=0),
            vocab_size if num_top < 0 else min(num_top, vocab_size),
        )
        return Pending(
            [found.token_ids, found.logprobs, found.ranks],
            lambda arrays: TokenLogprobs(*(array.tolist() for array in arrays)),
        )

    def sample_drafts(
        self, logits: Tensor, rows: LogitsRows, states: RequestStates
    ) -> tuple[Tensor, Tensor | None]:
        """One draft per row of a draft model's logits [L, V], NO_TOKEN where they are unusable.

        [L] int64, where the logits are. Drafts of a request are drawn one after the other: those
        before this one must already lie behind its known tokens in `states` if its logits are
        edited. A row's `num_known` is the position of the draft.

        Where tokens are matched the target's own noise draws them, so that equal logits give equal
        tokens, and there is nothing else to return. For rules that need it, noise of their own
        does, and the second result is what each draft was drawn from: [L, V] float32 probabilities,
        zero for greedy requests (which are matched) and unusable rows; None if all are.
        """
        backend = self.backend_for(logits.dtype)
        edited, _ = edit_logits(logits, rows, states, None, backend)
        draws = states.draws[rows.row]
        if self.rule is None or not self.rule.needs_probs or not draws[:, 0].any():
            return backend.draw(edited, rows, states, None), None
        processed = logits.new_empty(logits.shape)
        keys = self.rule.noise_keys(NoiseDomain.DRAFT, states, rows.row, rows.num_known)
        token_ids = draw_by(backend, edited, draws, keys, processed)
        is_matched = self.transfers.to_device(draws[:, 0] == 0) | (token_ids == NO_TOKEN)
        return token_ids, probabilities(processed).masked_fill_(is_matched[:, None], 0.0)


def _only_list(arrays: list[np.ndarray]) -> list[int]:
    values: list[int] = arrays[0].tolist()
    return values


def _is_usable(logits: Tensor, edited: Tensor) -> Pending[np.ndarray]:
    """[L] bool: whether the model's own logits are numbers, of rows that gave no token."""
    num_rows = len(logits)
    if edited is logits:  # then these are why
        return Pending([], lambda arrays: np.zeros(num_rows, np.bool_))
    return Pending([logits.amax(dim=1).isfinite()], lambda arrays: arrays[0])


def _explain(samples: RowSamples, is_usable: np.ndarray) -> None:
    """Record an error for each row that gave no token, unless a processor's is known."""
    for i, token_id in enumerate(samples.token_ids):
        if token_id == NO_TOKEN:
            if not is_usable[i]:
                samples.errors[i] = _BAD_LOGITS
            samples.errors.setdefault(i, _NOTHING_LEFT)
            samples.token_ids[i] = 0


def _put_logprobs(samples: RowSamples, index: np.ndarray, record: TokenLogprobs) -> None:
    """`record` is of the rows `index`; those that failed get none."""
    for j, i in enumerate(index.tolist()):
        if i not in samples.errors:
            samples.logprobs[i] = TokenLogprobs(
                [record.token_ids[j]], [record.logprobs[j]], [record.ranks[j]]
            )


def accept(batch: InputBatch, states: RequestStates, samples: RowSamples) -> SamplerOutput:
    """The match rule: keep drafts while each equals the token sampled at its row.

    The first miss is already the corrected token; if none misses, the last row is the bonus.
    Lossless for any proposer, because every row was sampled from the target. Where another rule
    has judged, its number stands: the token it stops with may equal the next draft.
    """
    output = SamplerOutput(token_ids=[], logprobs={}, errors={})
    starts, is_sampling = batch.logits_start.tolist(), batch.is_sampling.tolist()
    for i, request_id in enumerate(batch.request_ids):
        start, end = starts[i], starts[i + 1]
        if not is_sampling[i]:
            # The row may still tell that the KV of this chunk is spoilt.
            if start in samples.errors and samples.errors[start] is _BAD_LOGITS:
                output.errors[request_id] = _BAD_LOGITS
            output.token_ids.append([])
            continue
        last = start + _num_accepted(batch.rows[i], samples, start, end, states)
        if last in samples.errors:
            last -= 1  # what was accepted stands, as if one draft fewer were made: then this fails
            if last < start:
                output.errors[request_id] = samples.errors[start]
                output.token_ids.append([])
                continue
        output.token_ids.append(samples.token_ids[start : last + 1])
        logprobs = [entry for entry in samples.logprobs[start : last + 1] if entry is not None]
        if logprobs:
            output.logprobs[request_id] = concatenate(logprobs)
    return output


def _num_accepted(
    row: np.integer, samples: RowSamples, start: int, end: int, states: RequestStates
) -> int:
    """How many drafts of `row` were sampled as well; its logits rows are [start, end)."""
    if end - start == 1:
        return 0
    if start in samples.num_accepted:
        return samples.num_accepted[start]
    num_tokens = states.num_tokens[row]
    drafts = states.token_ids[row, num_tokens : num_tokens + end - start - 1].tolist()
    for i, draft in enumerate(drafts):
        if start + i in samples.errors or draft != samples.token_ids[start + i]:
            return i
    return len(drafts)


def concatenate(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """One record of consecutive tokens from several."""
    return TokenLogprobs(
        token_ids=[entry for part in parts for entry in part.token_ids],
        logprobs=[entry for part in parts for entry in part.logprobs],
        ranks=[rank for part in parts for rank in part.ranks],
    )
