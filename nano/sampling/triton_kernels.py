"""The kernels of `TritonSampling`: noise of (seed, position, token id) and the race, per chunk.

Importing this imports triton; `triton_backend.py` does so when it first draws.

The random bits are those of noise.py, bit for bit. So is all arithmetic up to the logarithms, which
may differ in the last places (log1p is made of log, as in noise_race.h). A row's chunks are of
fixed length, and of equals the lowest token id wins, so nothing depends on the batch.

L rows of V logits, each cut into C chunks of CHUNK; one program per row and chunk.
"""

import triton
import triton.language as tl


@triton.jit
def row_keys(seed, position):
    """Two uint32 keys from int64 seed and position: the splitmix64 finaliser, twice."""
    word = seed.to(tl.uint64, bitcast=True)
    word += (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    for _ in tl.static_range(2):
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB
        word = word ^ (word >> 31)
    return (word >> 32).to(tl.uint32), word.to(tl.uint32)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_bits(first, second, token_ids):
    """32 random bits per token, as `noise.random_bits`. token_ids: int32; the rest uint32."""
    return _mix(_mix(token_ids.to(tl.uint32, bitcast=True) * 0x9E3779B1 + first) ^ second)


@triton.jit
def log_exponential(bits):
    """log E, as `noise.log_exponential_from_bits`. uint32 -> float32."""
    high = (bits >> 16).to(tl.float32)
    low = (bits & 0xFFFF).to(tl.float32) + 0.5
    uniform = tl.minimum((high * 65536.0 + low) * 2.3283064365386963e-10, 0.9999999403953552)
    rest = 1.0 - uniform
    lost = (1.0 - rest) - uniform  # what the rounding of `rest` took, exactly
    return tl.log(-(tl.log(rest) + lost / rest))


@triton.jit
def best_of_chunks(logits, values, token_ids, stride, vocab_size, CHUNK: tl.constexpr):
    """values, token_ids: [L, C] float32, int32: the best of each chunk, inf where one is NaN."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    best, index = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    entry = row * tl.num_programs(1) + chunk
    tl.store(values + entry, best)
    tl.store(token_ids + entry, chunk * CHUNK + index)


@triton.jit
def race_of_chunks(
    logits,  # [L, V] float32
    best_values,  # [L, C], of best_of_chunks
    temperatures,  # [L] float32; 0 is greedy
    cuts,  # [L] float32: scaled logits below cannot be drawn
    seeds,  # [L] int64
    positions,  # [L] int64
    values,  # [L, C] float32 out: the best of the race in each chunk; of greedy rows nothing
    token_ids,  # [L, C] int32 out
    processed,  # [L, V] float32 out, if IS_PROCESSED_WANTED
    stride,
    processed_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    IS_PROCESSED_WANTED: tl.constexpr,
):
    """Scale, cut, and race one chunk: argmax of (logit - best) / temperature - log E."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = ids < vocab_size
    x = tl.load(logits + row * stride + ids, mask=is_token, other=float("-inf"))
    if temperature > 0:
        c = tl.arange(0, PADDED_CHUNKS)
        bests = tl.load(
            best_values + row * num_chunks + c, mask=c < num_chunks, other=float("-inf")
        )
        # Divided as IEEE says: the bits of torch's own division on CPU.
        scaled = tl.div_rn(x - tl.max(bests, 0), tl.full([CHUNK], 1.0, tl.float32) * temperature)
        x = tl.where(scaled >= tl.load(cuts + row), scaled, float("-inf"))
        first, second = row_keys(tl.load(seeds + row), tl.load(positions + row))
        score = x - log_exponential(random_bits(first, second, ids))
        # A row whose best is not finite has scores that are NaN: its token is refused anyway.
        score = tl.where(is_token & (score == score), score, float("-inf"))
        best, index = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + row * num_chunks + chunk, best)
        tl.store(token_ids + row * num_chunks + chunk, chunk * CHUNK + index)
    if IS_PROCESSED_WANTED:
        tl.store(processed + row * processed_stride + ids, x, mask=is_token)


@triton.jit
def winners(
    best_values,
    best_ids,
    race_values,
    race_ids,
    temperatures,
    tokens,  # [L] int64 out: -1 where the best logit is not finite
    num_chunks,
    PADDED_CHUNKS: tl.constexpr,
):
    """One token per row from what its chunks found; a program per row."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED_CHUNKS)
    entry = row * num_chunks + c
    is_chunk = c < num_chunks
    values = tl.load(best_values + entry, mask=is_chunk, other=float("-inf"))
    best, index = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best_ids + row * num_chunks + index)
    if tl.load(temperatures + row) > 0:
        values = tl.load(race_values + entry, mask=is_chunk, other=float("-inf"))
        _, index = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(race_ids + row * num_chunks + index)
    is_usable = (best > float("-inf")) & (best < float("inf"))
    tl.store(tokens + row, tl.where(is_usable, token, -1).to(tl.int64))
