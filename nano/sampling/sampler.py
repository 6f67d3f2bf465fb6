"""Sampler: logits rows -> tokens, and which drafts those tokens accept.

Order of operations, as in vLLM:
  1. raw logprobs are taken from the model's logits as they are
  2. masks and allowed_token_ids, bad_words, min_tokens, logit_bias, penalties   (logits.py)
  3. greedy rows: argmax. The others: temperature, min_p, top_k, top_p           (truncation.py)
  4. an exponential race over what is left                                       (noise.py)
  5. processed logprobs are taken from what step 4 drew from

Every row is sampled alone and from its own key, so nothing about the batch can reach it. With
no drafts a request has one row and this is ordinary sampling; there is no second path.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nano.batch.input_batch import InputBatch, LogitsRows
from nano.batch.request_states import RequestStates
from nano.sampling.logits import edit_logits
from nano.sampling.logprobs import gather_logprobs
from nano.sampling.noise import log_exponential
from nano.sampling.truncation import survivors
from nano.sampling_params import SamplingParams
from nano.step import TokenLogprobs

_SPARSE = 8  # noise of single tokens costs about this many times its share of a whole row's
_BAD_LOGITS = "the model produced logits that are not numbers (NaN or infinity) for this request"
_NOTHING_LEFT = "no token may be sampled: the request's own restrictions exclude all of them"


@dataclass(slots=True)
class RowSamples:
    """One token per logits row, and what else was asked of the row."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # of one token each
    errors: dict[int, str] = field(default_factory=dict)  # row -> why its token means nothing

    def extend(self, other: "RowSamples") -> None:
        offset = len(self.token_ids)
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.errors.update({offset + row: why for row, why in other.errors.items()})


@dataclass(slots=True)
class SamplerOutput:
    """What one step sampled, per request of the batch."""

    token_ids: list[list[int]]  # accepted drafts and one more; [] for a request that goes on
    logprobs: dict[str, TokenLogprobs]
    errors: dict[str, str]


class Sampler:
    """Turns logits into tokens. Nothing of one call can be seen in the next."""

    def __init__(self, logprobs_mode: str = "raw_logprobs"):
        self.takes_raw_logprobs = logprobs_mode == "raw_logprobs"
        self._arange = torch.empty(0, dtype=torch.int32)

    def sample_rows(
        self, logits: Tensor, rows: LogitsRows, states: RequestStates, mask: Tensor | None = None
    ) -> RowSamples:
        """Sample every row. logits: [L, V] float32 or float64, not modified.

        mask: [L, V] bool, True where a grammar allows the token, or None.
        """
        edited = edit_logits(logits, rows, states, mask)
        best_values, best_ids = edited.max(dim=1)  # propagates NaN
        samples = RowSamples(token_ids=best_ids.tolist())
        if not bool(torch.isfinite(best_values).all()):
            self._explain(logits, best_values, samples)
        for i, row in enumerate(rows.row):
            params = states.row_params(row).sampling_params
            processed = edited[i]
            if not params.is_greedy and i not in samples.errors:
                token_id, processed = self._draw(edited[i], params, int(rows.num_known[i]))
                samples.token_ids[i] = token_id
            if params.logprobs is None or i in samples.errors:
                samples.logprobs.append(None)
                continue
            source = logits[i] if self.takes_raw_logprobs else processed
            token = torch.tensor([samples.token_ids[i]])
            samples.logprobs.append(gather_logprobs(source[None], token, params.logprobs))
        return samples

    def _draw(self, logits: Tensor, params: SamplingParams, position: int) -> tuple[int, Tensor]:
        """The token of one row, and the [V] logits it was drawn from (-inf: could not be)."""
        # The best token is moved to zero first, so that a tiny temperature cannot overflow it.
        scaled = (logits - logits.max()) / params.temperature
        mask = survivors(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        if mask is not None:
            scaled = scaled.masked_fill_(mask.logical_not(), float("-inf"))
        assert params.seed is not None
        if mask is None or int(mask.sum()) * _SPARSE > mask.numel():
            noise = log_exponential(params.seed, position, self._all_token_ids(scaled.numel()))
            return int((scaled - noise).argmax()), scaled
        token_ids = mask.nonzero().squeeze(1)  # few: their noise alone is cheaper, and the same
        noise = log_exponential(params.seed, position, token_ids.to(torch.int32))
        return int(token_ids[(scaled[token_ids] - noise).argmax()]), scaled

    def _all_token_ids(self, vocab_size: int) -> Tensor:
        """arange(vocab_size), made once. int32."""
        if self._arange.numel() != vocab_size:
            self._arange = torch.arange(vocab_size, dtype=torch.int32)
        return self._arange

    def _explain(self, logits: Tensor, best_values: Tensor, samples: RowSamples) -> None:
        """Record an error for each row whose best logit is not finite."""
        for i in torch.isfinite(best_values).logical_not_().nonzero().flatten().tolist():
            raw_is_fine = bool(torch.isfinite(logits[i].max()))
            samples.errors[i] = _NOTHING_LEFT if raw_is_fine else _BAD_LOGITS
            samples.token_ids[i] = 0


def accept(batch: InputBatch, states: RequestStates, samples: RowSamples) -> SamplerOutput:
    """The match rule: keep drafts while each equals the token sampled at its row.

    The first miss is already the corrected token; if none misses, the last row is the bonus.
    Lossless for any proposer, because every row was sampled from the target.
    """
    output = SamplerOutput(token_ids=[], logprobs={}, errors={})
    for i, request_id in enumerate(batch.request_ids):
        start = int(batch.logits_start[i])
        if not batch.is_sampling[i]:
            # The row may still tell that the KV of this chunk is spoilt.
            if start in samples.errors and samples.errors[start] is _BAD_LOGITS:
                output.errors[request_id] = _BAD_LOGITS
            output.token_ids.append([])
            continue
        row = int(batch.rows[i])
        num_tokens, num_drafts = int(states.num_tokens[row]), int(batch.num_drafts[i])
        drafts = states.token_ids[row, num_tokens : num_tokens + num_drafts].tolist()
        num_accepted = 0
        while (
            num_accepted < num_drafts
            and start + num_accepted not in samples.errors
            and drafts[num_accepted] == samples.token_ids[start + num_accepted]
        ):
            num_accepted += 1
        last = start + num_accepted
        if last in samples.errors:
            output.errors[request_id] = samples.errors[last]
            output.token_ids.append([])
            continue
        output.token_ids.append(samples.token_ids[start : last + 1])
        logprobs = [entry for entry in samples.logprobs[start : last + 1] if entry is not None]
        if logprobs:
            output.logprobs[request_id] = concatenate(logprobs)
    return output


def concatenate(parts: list[TokenLogprobs]) -> TokenLogprobs:
    """One record of consecutive tokens from several."""
    return TokenLogprobs(
        token_ids=[entry for part in parts for entry in part.token_ids],
        logprobs=[entry for part in parts for entry in part.logprobs],
        ranks=[rank for part in parts for rank in part.ranks],
    )
