"""ModelRunner: one step of the device, plan in, output out. It fits on a page and stays there.

    forward(plan)   rows, batch, attention plan, model   -> hidden states
    sample(mask)    logits, tokens, accepted drafts, next drafts   -> StepOutput

They are two methods so that a grammar's mask can be built while the forward pass runs.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nano.attention.op import ForwardContext, forward_context
from nano.compile.artifact import ForwardFn
from nano.model_input.input_batch import InputBatch, InputBatchBuilder, LogitsRows
from nano.model_input.own_drafts import FilledPlan, OwnDrafts
from nano.model_input.request_states import RequestStates
from nano.models.decoder import Decoder
from nano.sampling.pending import Pending, all_of
from nano.sampling.sampler import RowSamples, Sampler, accept, concatenate
from nano.spec.proposers import Proposers
from nano.step import StepOutput, StepPlan, TokenLogprobs

# Most bytes of logits that exist at once; more rows are computed in chunks.
_MAX_LOGITS_BYTES = 64 * 2**20


@dataclass(slots=True)
class _Forwarded:
    """A step between its two halves."""

    own: FilledPlan
    batch: InputBatch
    hidden: Tensor  # [L + P, hidden]: of batch.output_rows
    seconds: float


class ModelRunner:
    """Runs steps of one model on one device. Owns the request states, nothing else mutable."""

    def __init__(
        self,
        model: Decoder,
        model_forward: ForwardFn,
        context: ForwardContext,
        states: RequestStates,
        batch_builder: InputBatchBuilder,
        sampler: Sampler,
        proposers: Proposers,
        own_drafts: OwnDrafts,
    ) -> None:
        self.model = model
        self.model_forward = model_forward
        self.context = context
        self.states = states
        self.batch_builder = batch_builder
        self.sampler = sampler
        self.proposers = proposers
        self.own_drafts = own_drafts
        self._forwarded: _Forwarded | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        self.forward(plan)
        return self.sample()

    def forward(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        own = self.own_drafts.fill_in(plan)
        self.states.apply(own.plan)
        self.proposers.update(own.plan, self.states)
        batch = self.batch_builder.build(own.plan, own.unread)
        self.context.backend.plan(batch.attention)
        with forward_context(self.context):
            hidden = self.model_forward(batch.input_ids, batch.positions, batch.output_rows)
        self._forwarded = _Forwarded(own, batch, hidden, time.perf_counter() - started)

    @property
    def hidden(self) -> Tensor:
        """[L + P, hidden] of the step that `forward` has begun, as in its InputBatch."""
        assert self._forwarded is not None
        return self._forwarded.hidden

    def sample(self, mask: Tensor | None = None) -> StepOutput:
        """mask: [L, V] bool, True where a token may be drawn; None allows all."""
        assert self._forwarded is not None
        step, self._forwarded = self._forwarded, None
        batch = step.batch
        unverified = self.own_drafts.read(step.own)
        for request_id in step.own.unread:
            row = self.states.row_of[request_id]
            self.states.put_drafts(row, step.own.verified[request_id])
        started = time.perf_counter()

        parts = []
        hidden, hidden_of_prompts = step.hidden.tensor_split((len(batch.logits.row),))
        for start, rows, logits in self._logits(hidden, batch.logits, batch.logits_start):
            row_mask = None if mask is None else mask[start : start + len(rows.row)]
            parts.append(self.sampler.queue_rows(logits, rows, self.states, row_mask))
        results = all_of([all_of(parts), self._prompt_logprobs(hidden_of_prompts, batch)])
        # The one wait for this step. Else only rules and custom processors make the host wait.
        found, prompt_logprobs = results.read(self.sampler.transfers)
        samples = RowSamples()
        for part in found:
            samples.extend(part)
        sampled = accept(batch, self.states, samples)
        for i, token_ids in enumerate(sampled.token_ids):
            self.states.commit(
                int(batch.rows[i]), int(batch.num_scheduled[i]), int(batch.num_drafts[i]), token_ids
            )
        sampled_at = time.perf_counter()
        drafts = self.proposers.propose(step.own.plan, batch, sampled.token_ids, self.states)
        shown = self.own_drafts.keep(batch.request_ids, drafts.made)
        return StepOutput(
            request_ids=batch.request_ids,
            token_ids=sampled.token_ids,
            draft_token_ids=shown,
            draft_sources=[source if ids else "" for source, ids in zip(drafts.sources, shown)],
            verified_token_ids=step.own.verified,
            unverified_token_ids=unverified,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=sampled.errors,
            forward_seconds=step.seconds,
            sample_seconds=sampled_at - started,
            draft_seconds=drafts.seconds + self.own_drafts.take_seconds_waited(),
            num_draft_passes=drafts.num_passes,
            num_draft_pass_tokens=drafts.num_pass_tokens,
            num_caught_up_tokens=drafts.num_caught_up_tokens,
        )

    def _logits(
        self, hidden: Tensor, rows: LogitsRows, starts: np.ndarray | None = None
    ) -> Iterator[tuple[int, LogitsRows, Tensor]]:
        """(first row, rows, their logits [n, V]), in chunks under the memory cap; `hidden` [L,
        hidden] is theirs.

        With `starts` [R + 1] the rows of a request, starts[i]:starts[i + 1], stay in one chunk.
        """
        bytes_per_row = self.model.config.vocab_size * max(hidden.element_size(), 4)  # float32
        size = max(1, _MAX_LOGITS_BYTES // bytes_per_row)
        start, num_rows = 0, len(rows.row)
        while start < num_rows:
            stop = min(start + size, num_rows)
            if starts is not None:
                whole = int(starts[starts.searchsorted(stop, side="right") - 1])
                stop = whole if whole > start else int(starts[starts.searchsorted(stop)])
            yield start, rows.chunk(start, stop), self.model.compute_logits(hidden[start:stop])
            start = stop

    def _prompt_logprobs(
        self, hidden: Tensor, batch: InputBatch
    ) -> Pending[dict[str, TokenLogprobs]]:
        """Logprobs of the prompt tokens that this step's rows predict, by request; `hidden` [P,
        hidden] is theirs."""
        rows = batch.prompt_logits
        if rows is None:
            return Pending([], lambda arrays: {})
        request_of = dict(zip(batch.rows.tolist(), batch.request_ids))
        owners, parts = [], []
        for _, chunk, logits in self._logits(hidden, rows):
            known = self.states.token_ids[chunk.row, chunk.num_known].astype(np.int64)
            targets = self.sampler.transfers.to_device(known)
            for row in dict.fromkeys(chunk.row.tolist()):
                num_top = self.states.row_params(row).sampling_params.prompt_logprobs
                assert num_top is not None
                mine = np.flatnonzero(chunk.row == row)
                parts.append(self.sampler.queue_logprobs(logits, mine, targets, num_top))
                owners.append(request_of[row])

        def collect(records: list[TokenLogprobs]) -> dict[str, TokenLogprobs]:
            found: dict[str, list[TokenLogprobs]] = {}
            for request_id, record in zip(owners, records):
                found.setdefault(request_id, []).append(record)
            return {request_id: concatenate(records) for request_id, records in found.items()}

        return all_of(parts).then(collect)
