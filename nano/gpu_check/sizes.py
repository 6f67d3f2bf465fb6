"""Sizes: how much of everything the check does."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

# Tokens in the cache, tokens to compute: decode (short, and over two ranges of 512 positions),
# verification, a first chunk, a later one, one token alone.
_RAGGED = ((7, 1), (0, 1), (700, 1), (1100, 1), (12, 4), (530, 5), (0, 40), (300, 70))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one kind of run. Models are names in `models.SHAPES`."""

    seconds: float  # for all of it
    model_dtype: torch.dtype  # what models compute in, unless told
    backends: tuple[str, ...]  # that are checked, in this order
    attention_shapes: tuple[str, ...]
    attention_dtypes: tuple[tuple[str, str], ...]  # of queries, and of the cache
    ragged: tuple[tuple[int, int], ...]
    vocab_size: int  # of sampled rows
    num_sampled_rows: int
    # float32 has no near-ties to speak of, and bfloat16 is what is served.
    token_models: tuple[tuple[str, Literal["auto", "float32"]], ...]
    num_requests: int
    num_tokens: int  # that each of them generates
    timed_models: tuple[str, ...]
    batches: tuple[int, ...]
    num_timed_steps: int
    prompt_len: int  # of timed requests
    prefill_len: int  # one prompt, in one step
    copied_bytes: int
    matrix_size: int


FULL = Sizes(
    seconds=440.0,
    model_dtype=torch.bfloat16,
    backends=("triton", "torch", "flashinfer"),
    attention_shapes=("135M", "1.5B", "8B"),
    attention_dtypes=(
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
    ),
    ragged=_RAGGED,
    vocab_size=151936,
    num_sampled_rows=64,
    token_models=(("135M", "float32"), ("1.5B", "auto")),
    num_requests=12,
    num_tokens=48,
    timed_models=("135M", "1.5B", "8B"),
    batches=(1, 8, 64, 256),
    num_timed_steps=32,
    prompt_len=64,
    prefill_len=2048,
    copied_bytes=2**30,
    matrix_size=8192,
)

QUICK = replace(
    FULL,
    seconds=160.0,
    backends=("triton", "torch"),
    attention_shapes=("135M", "1.5B"),
    attention_dtypes=(("float32", "float32"), ("bfloat16", "bfloat16")),
    num_sampled_rows=32,
    token_models=(("135M", "float32"),),
    num_requests=8,
    num_tokens=32,
    timed_models=("1.5B", "135M"),
    num_timed_steps=24,
)

# The same program where there is no GPU, in seconds.
TINY = Sizes(
    seconds=120.0,
    model_dtype=torch.float32,
    backends=("cpu", "torch", "triton", "flashinfer"),
    attention_shapes=("tiny",),
    attention_dtypes=(("float32", "float32"), ("float32", "bfloat16")),
    ragged=((7, 1), (0, 1), (70, 1), (12, 4), (0, 20), (30, 9)),
    vocab_size=1000,
    num_sampled_rows=16,
    token_models=(("tiny", "auto"),),
    num_requests=4,
    num_tokens=12,
    timed_models=("tiny",),
    batches=(1, 4),
    num_timed_steps=8,
    prompt_len=8,
    prefill_len=64,
    copied_bytes=2**22,
    matrix_size=128,
)
