"""Requests and random texts for tests of proposers that look at text."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nano.sampling_params import SamplingParams
from nano.spec.proposer import TextProposer
from nano.step import NewRequest


def new_request(
    token_ids: Sequence[int], num_prompt_tokens: int | None = None, **fields: Any
) -> NewRequest:
    return NewRequest(
        request_id=fields.pop("request_id", "a"),
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_computed_tokens=0,
        block_ids=[],
        sampling_params=SamplingParams(seed=0),
        **fields,
    )


def array_of(token_ids: Sequence[int]) -> np.ndarray:
    return np.array(token_ids, np.int32)


def guess(
    proposer: TextProposer, token_ids: Sequence[int], num_tokens: int, request_id: str = "a"
) -> list[int]:
    known = array_of(token_ids)
    proposer.advance(request_id, known)
    return proposer.propose(request_id, known, num_tokens)


def random_text(rng: random.Random, num_tokens: int) -> list[int]:
    """Of one to four different tokens, often with a run that is copied from before."""
    num_kinds = rng.randint(1, 4)
    text: list[int] = []
    while len(text) < num_tokens:
        if text and rng.random() < 0.2:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randint(1, 8)]
        text.append(rng.randrange(num_kinds))
    return text[:num_tokens]


def chunks_of(rng: random.Random, num_tokens: int, largest: int) -> Iterator[int]:
    """Ends of chunks that make up `num_tokens` tokens."""
    end = 0
    while end < num_tokens:
        end = min(num_tokens, end + rng.randint(1, largest))
        yield end
