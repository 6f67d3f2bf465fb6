"""Verification: tokens of drafted requests, by an acceptance rule, in place of the target's own.

L logits rows of whole requests: a request with k drafts has k + 1 of them, side by side. After it,
the rows hold the accepted drafts and the one token behind them; what later rows hold is never read.

Rules judge on the host: a step that verifies by one waits for the device several times. The match
rule, which is not here, does not.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.sampling.acceptance import AcceptanceRule, DraftedRequests, Verdict
from nano.sampling.backend import NO_TOKEN, NoiseTable, SamplingBackend
from nano.sampling.noise import NoiseDomain, uniforms

_AS_IT_IS = (1.0, 1.0, 0.0, 0.0)  # temperature, top_p, min_p, top_k


@dataclass(slots=True)
class DraftedRows:
    """The requests of a chunk that a rule judges. [N] int64 both."""

    first: np.ndarray  # logits row of the first draft, in the chunk
    num_drafts: np.ndarray


def find_drafted(
    rule: AcceptanceRule, rows: LogitsRows, states: RequestStates
) -> DraftedRows | None:
    """Which requests of the chunk `rule` judges; None if it judges none.

    Rules that need probabilities leave greedy requests, and drafts without, to the match rule.
    """
    is_first = np.diff(rows.row, prepend=-1) != 0
    first = is_first.nonzero()[0]
    num_drafts = np.diff(first, append=len(rows.row)) - 1
    is_judged = num_drafts > 0
    if rule.needs_probs:
        row = rows.row[first]
        is_judged &= states.draws[row, 0] > 0
        is_judged &= np.array([r in states.draft_probs for r in row.tolist()], np.bool_)
    if not is_judged.any():
        return None
    return DraftedRows(first[is_judged], num_drafts[is_judged])


def verify(
    rule: AcceptanceRule,
    backend: SamplingBackend,
    drafted: DraftedRows,
    rows: LogitsRows,
    states: RequestStates,
    processed: Tensor,
    token_ids: list[int],
) -> dict[int, int]:
    """Rewrite `token_ids` [L] of the drafted requests. First row -> number of accepted drafts.

    processed: [L, V], what the target's own tokens were drawn from. Drafts are judged up to the
    first row that failed (NO_TOKEN); if all those are accepted, the failure counts.
    """
    failed = [row for row, token_id in enumerate(token_ids) if token_id == NO_TOKEN]
    drafted = _before_failed(drafted, failed)
    if not len(drafted.first):
        return {}
    drafts = _gather(rule, drafted, rows, states, processed)
    verdict = rule.judge(drafts)
    last = drafted.first + verdict.num_accepted
    for n, (first, count) in enumerate(zip(drafted.first.tolist(), verdict.num_accepted.tolist())):
        token_ids[first : first + count] = drafts.token_ids[n, :count].tolist()
    if rule.needs_probs:
        logits = _final_logits(drafts, verdict, processed, last)
        position = rows.num_known[last]
        keys = rule.noise_keys(NoiseDomain.RESIDUAL, states, rows.row[last], position)
        final_ids = draw_by(backend, logits, _AS_IT_IS, keys)
        for row, token_id in zip(last.tolist(), _read(backend, final_ids)):
            if token_ids[row] != NO_TOKEN:
                token_ids[row] = token_id
    return dict(zip(drafted.first.tolist(), verdict.num_accepted.tolist()))


def draw_by(
    backend: SamplingBackend,
    logits: Tensor,
    draws: tuple[float, ...] | np.ndarray,
    keys: tuple[np.ndarray, np.ndarray],
    processed: Tensor | None = None,
) -> Tensor:
    """[N] int64: one token per row of `logits` [N, V], with the noise of `keys`.

    keys: [N] seeds, [N] positions. draws: [N, 4], or one for all; see `DrawTable`.
    """
    seeds, positions = keys
    table = NoiseTable(np.array(np.broadcast_to(draws, (len(seeds), 4)), order="C"), seeds)
    own_rows = LogitsRows(np.arange(len(seeds)), positions)
    return backend.draw(logits, own_rows, table, processed)


def probabilities(logits: Tensor) -> Tensor:
    """[N, V] float32. Every row alone: its bits do not depend on N. logits: -inf where excluded."""
    return torch.softmax(logits, dim=-1).float()


def _read(backend: SamplingBackend, token_ids: Tensor) -> list[int]:
    (array,) = backend.transfers.to_host([token_ids]).wait()
    read: list[int] = array.tolist()
    return read


def _before_failed(drafted: DraftedRows, failed: list[int]) -> DraftedRows:
    """Each request's drafts up to its first failed row, without requests that have none left."""
    num_drafts = drafted.num_drafts.copy()
    for row in failed:
        n = int(drafted.first.searchsorted(row, side="right")) - 1
        if n >= 0 and row - drafted.first[n] < num_drafts[n]:
            num_drafts[n] = row - drafted.first[n]
    return DraftedRows(drafted.first[num_drafts > 0], num_drafts[num_drafts > 0])


def _gather(
    rule: AcceptanceRule,
    drafted: DraftedRows,
    rows: LogitsRows,
    states: RequestStates,
    processed: Tensor,
) -> DraftedRequests:
    counts, most = drafted.num_drafts, int(drafted.num_drafts.max())
    row = rows.row[drafted.first]
    # Padded places get positions, tokens and uniforms too, and nobody reads them.
    position = states.num_tokens[row].astype(np.int64)[:, None] + np.arange(most)
    seeds, positions = rule.noise_keys(
        NoiseDomain.ACCEPTANCE, states, row.repeat(most), position.ravel()
    )
    in_row = np.minimum(position, states.token_ids.shape[1] - 1)
    p = q = processed[:0]
    if rule.needs_probs:
        num_rows = counts + 1
        shift = drafted.first - (num_rows.cumsum() - num_rows)
        index = np.arange(num_rows.sum()) + shift.repeat(num_rows)
        is_all = len(index) == len(processed)  # often, and then nothing is copied
        p = probabilities(processed if is_all else processed[torch.from_numpy(index)])
        # More may have been drawn than are verified.
        q = torch.cat([states.draft_probs[r][:k] for r, k in zip(row.tolist(), counts.tolist())])
    return DraftedRequests(
        num_drafts=counts,
        token_ids=states.token_ids[row[:, None], in_row].astype(np.int64),
        uniforms=uniforms(seeds, positions).reshape(position.shape),
        p=p,
        q=q,
    )


def _final_logits(
    drafts: DraftedRequests, verdict: Verdict, processed: Tensor, last: np.ndarray
) -> Tensor:
    """[N, V]: what each request's last token is drawn from, at temperature 1.

    The target's own row behind accepted drafts; else the residual, or that row again if p and q
    are so equal that nothing of the residual is left.
    """
    logits = processed[torch.from_numpy(last)]
    n = (verdict.num_accepted < drafts.num_drafts).nonzero()[0]
    if len(n):
        residual = drafts.residual(n, verdict.num_accepted[n], verdict.scale[n])
        has_mass = residual.amax(dim=1) > 0
        index = torch.from_numpy(n).to(logits.device)[has_mass]
        logits[index] = residual[has_mass].log_().to(logits.dtype)
    return logits
