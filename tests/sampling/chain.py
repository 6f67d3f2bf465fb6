"""A model small enough to know its law: the next token depends on the last one alone.

`run` generates with the production sampler, states and keys, step after step, many requests at
once; `law` is the distribution that must come out.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from nano.model_input.input_batch import LogitsRows
from nano.model_input.request_states import RequestStates
from nano.sampling.sampler import Sampler, accept
from nano.sampling_params import SamplingParams
from nano.step import NewRequest, StepPlan

FIRST = 0  # the prompt: one token


def make_tables(vocab_size: int, closeness: float = 0.6) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of target and draft by last token: [V, V] float32 both."""
    generator = torch.Generator().manual_seed(1)
    target, other = 1.5 * torch.randn(2, vocab_size, vocab_size, generator=generator)
    return target, closeness * target + (1 - closeness) * other


def processed(logits: np.ndarray, setting: dict) -> np.ndarray:
    """The distribution of one row [V] in float64, by the documented order of operations."""
    x = logits.astype(np.float64) / setting.get("temperature", 1.0)
    if setting.get("min_p"):
        x[x < x.max() + math.log(setting["min_p"])] = -np.inf
    order = np.argsort(-x)
    if setting.get("top_k"):
        x[order[setting["top_k"] :]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if "top_p" in setting:
        num_kept = int(np.argmax(np.cumsum(p[order]) >= setting["top_p"])) + 1
        p[order[num_kept:]] = 0.0
    return p / p.sum()


def law(table: torch.Tensor, setting: dict, length: int) -> np.ndarray:
    """Joint distribution of the first `length` tokens: [V, V, ...] float64."""
    p = np.stack([processed(row, setting) for row in table.numpy()])
    joint = p[FIRST]
    for _ in range(length - 1):
        joint = joint[..., None] * p
    return joint


def admit(params: Sequence[SamplingParams], length: int) -> RequestStates:
    """One request per entry, request i in row i."""
    states = RequestStates(len(params), length, block_size=16)
    states.apply(
        StepPlan(
            step=0,
            new_requests=[NewRequest(str(i), [FIRST], 1, 0, [], p) for i, p in enumerate(params)],
        )
    )
    return states


def rows_of(states: RequestStates, row: np.ndarray, counts: np.ndarray) -> LogitsRows:
    """`counts[i]` rows for request `row[i]`, the first of them behind its known tokens."""
    rank = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    return LogitsRows(row.repeat(counts), states.num_tokens[row].repeat(counts) + rank)


def draft(sampler: Sampler, states: RequestStates, table: torch.Tensor, counts: dict[int, int]):
    """Draws `counts[row]` drafts and leaves them, with what they were drawn from, in `states`."""
    probs: dict[int, list[torch.Tensor]] = {row: [] for row in counts}
    for i in range(max(counts.values(), default=0)):
        row = np.array([r for r, count in counts.items() if count > i], np.int64)
        position = states.num_tokens[row].astype(np.int64) + i
        logits = table[states.token_ids[row, position - 1]]
        rows = LogitsRows(row, position)
        token_ids, drawn_from = sampler.sample_drafts(logits, rows, states)
        states.token_ids[row, position] = token_ids
        if drawn_from is not None:
            for r, p in zip(row.tolist(), drawn_from):
                probs[r].append(p)
    for r, parts in probs.items():
        if parts:
            states.draft_probs[r] = torch.stack(parts)


def verify(sampler: Sampler, states: RequestStates, table: torch.Tensor, counts: dict[int, int]):
    """One step for requests with `counts[row]` drafts: their new tokens, which are committed."""
    row, num_drafts = (np.array(list(part), np.int64) for part in (counts.keys(), counts.values()))
    rows = rows_of(states, row, num_drafts + 1)
    samples = sampler.sample_rows(
        table[states.token_ids[rows.row, rows.num_known - 1]], rows, states
    )
    batch = SimpleNamespace(
        request_ids=[str(r) for r in row],
        rows=row,
        is_sampling=np.ones(len(row), np.bool_),
        logits_start=np.concatenate(([0], (num_drafts + 1).cumsum())),
    )
    output = accept(batch, states, samples)
    for r, k, token_ids in zip(row.tolist(), num_drafts.tolist(), output.token_ids):
        states.commit(r, k + 1, k, token_ids)
    return output.token_ids


def run(
    sampler: Sampler,
    tables: tuple[torch.Tensor, torch.Tensor],
    params: Sequence[SamplingParams],
    counts: Sequence[tuple[int, int]],
    length: int,
) -> np.ndarray:
    """The first `length` tokens of every request: [N, length].

    counts: per request, drafts drawn and, of those, drafts verified in each step.
    """
    target, draft_table = tables
    most = max(drawn for drawn, _ in counts)
    states = admit(params, length + 2 * most + 4)
    while len(going := np.flatnonzero(states.num_tokens <= length)):
        draft(sampler, states, draft_table, {r: counts[r][0] for r in going.tolist()})
        verify(sampler, states, target, {r: counts[r][1] for r in going.tolist()})
    return states.token_ids[:, 1 : length + 1]


def count(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each sequence occurs: [V, V, ...]. tokens: [N, length]."""
    shape = (vocab_size,) * tokens.shape[1]
    cells = np.ravel_multi_index(tuple(tokens.T.astype(np.int64)), shape)
    return np.bincount(cells, minlength=math.prod(shape)).reshape(shape)


def deviation(counts: np.ndarray, p: np.ndarray) -> float:
    """Chi-square of counts against `p`, in standard deviations from its mean."""
    expected = p * counts.sum()
    cells = expected > 5
    # What is too rare for a cell of its own shares one.
    pairs = np.append((counts - expected)[cells], (counts - expected)[~cells].sum())
    weights = np.append(expected[cells], max(expected[~cells].sum(), 1e-9))
    kept = weights > 5
    degrees = int(kept.sum()) - 1
    return float(((pairs[kept] ** 2 / weights[kept]).sum() - degrees) / math.sqrt(2 * degrees))


def excess_distance(counts: np.ndarray, p: np.ndarray) -> float:
    """Total variation between counts and `p`, in standard deviations above what chance gives."""
    num_samples = counts.sum()
    variance = p * (1 - p) / num_samples
    distance = 0.5 * np.abs(counts / num_samples - p).sum()
    by_chance = 0.5 * np.sqrt(2 / math.pi * variance).sum()
    return float((distance - by_chance) / (0.5 * math.sqrt((1 - 2 / math.pi) * variance.sum())))
