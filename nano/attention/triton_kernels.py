"""The kernels of `TritonBackend`: KV write, attention over ranges of positions, merge of ranges.

Importing this imports triton; `triton_backend.py` does so when the first backend is made.

Order of sums. A row (one query token of one head) meets positions in tiles of BLOCK_N, counted from
position 0 of its request. Tiles are summed one after the other within a range of RANGE positions
(online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135),
ranges are folded one after the other. So a row's bits depend neither on the batch nor on the chunk,
and not on the block size, and a range may be computed by a program of its own: `attend` with
`is_split` stores every range, and `merge_ranges` folds them as `attend` alone would have done.

M = BLOCK_M rows of a tile: TOKENS = M // GROUP query tokens, GROUP heads each. N = BLOCK_N
positions. D head dim padded to a power of two; KVH key/value heads.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["k_token", "k_head", "v_token", "v_head"])
def write_kv(
    k,  # [T, KVH, HEAD_DIM]
    v,
    slots,  # [T] int64, negative where nothing is written
    cache,  # [num_blocks, 2, BLOCK_SIZE, KVH, HEAD_DIM]
    k_token,  # strides
    k_head,
    v_token,
    v_head,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Store one token's keys and values; a program per token.

    A weight of zero times NaN is NaN, so a value that is no number would spoil rows that must not
    see it. It is stored as zero, and its key as NaN: a score that is hidden spoils nobody, and one
    that is seen spoils the row as it should.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head = tl.arange(0, PADDED_HEADS)[:, None]
        d = tl.arange(0, D)[None, :]
        mask = (head < NUM_KV_HEADS) & (d < HEAD_DIM)
        key = tl.load(k + token * k_token + head * k_head + d, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_token + head * v_head + d, mask=mask, other=0.0)
        value = value.to(tl.float32)
        is_finite = (
            tl.abs(value) <= LARGEST
        )  # what the cache's dtype would round to infinity is not
        is_spoilt = tl.min(is_finite.to(tl.int32), 1) == 0
        key = tl.where(is_spoilt[:, None], float("nan"), key)
        value = tl.where(is_spoilt[:, None], 0.0, value)
        ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
        block = slot // BLOCK_SIZE
        place = cache + (block * 2 * BLOCK_SIZE + slot % BLOCK_SIZE) * ROW + head * HEAD_DIM + d
        kind = cache.dtype.element_ty
        tl.store(place, key.to(kind), mask=mask)
        tl.store(place + BLOCK_SIZE * ROW, value.to(kind), mask=mask)


@triton.jit
def _find_tile(rows, num_requests, TOKENS: tl.constexpr):
    """Whose queries this program computes: (request, its first token in the step, first query of
    the tile, number of queries, KV length).

    A request begins with tile start // TOKENS + request, so tiles are found without a list made on
    the host; some belong to nobody, and find no query left.
    """
    tile = tl.program_id(0)
    request = tl.full((), 0, tl.int32)
    end = num_requests
    while end - request > 1:
        middle = (request + end) // 2
        is_reached = tl.load(rows + 2 * middle) // TOKENS + middle <= tile
        request = tl.where(is_reached, middle, request)
        end = tl.where(is_reached, end, middle)
    start = tl.load(rows + 2 * request)
    seq_len = tl.load(rows + 2 * request + 1)
    num_queries = tl.load(rows + 2 * request + 2) - start
    first = (tile - start // TOKENS - request) * TOKENS
    return request, start, first, num_queries, seq_len


@triton.jit
def _fold(best, mass, total, next_best, next_mass, next_total):
    """The state of rows after one more range, which may hold no position that they see.

    Explicit multiply-adds: two kernels do this, and no compiler may contract it in its own way.
    """
    merged = tl.maximum(best, next_best)
    zero = tl.where(merged == float("-inf"), 0.0, merged)  # nothing seen yet: no -inf - -inf
    old = tl.exp2(best - zero)
    new = tl.exp2(next_best - zero)
    mass = tl.fma(mass, old, next_mass * new)
    total = tl.fma(total, tl.broadcast_to(old[:, None], total.shape), next_total * new[:, None])
    return merged, mass, total


@triton.jit
def _sum_range(
    queries,  # [M, D]
    cache,  # of this program's head
    table,  # row of this program's request
    position,  # [M]: where each query is, and the last position that it sees
    begin,
    end,  # what is behind is not in the cache
    scale,
    ROW: tl.constexpr,  # numbers between two slots of a head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The state of rows over the positions of one range: best score [M], mass [M], total [M, D]."""
    d = tl.arange(0, queries.shape[1])
    best = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    mass = tl.zeros([queries.shape[0]], tl.float32)
    total = tl.zeros(queries.shape, tl.float32)
    for tile_start in range(begin, end, BLOCK_N):
        n = tile_start + tl.arange(0, BLOCK_N)
        is_cached = n < end
        block = tl.load(table + n // BLOCK_SIZE, mask=is_cached, other=0)
        slot = block.to(tl.int64) * (2 * BLOCK_SIZE) + n % BLOCK_SIZE
        keys = cache + slot * ROW
        key = tl.load(
            keys[None, :] + d[:, None],
            mask=is_cached[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )
        score = tl.dot(queries, key.to(queries.dtype), input_precision="ieee") * scale
        is_visible = n[None, :] <= position[:, None]
        score = tl.where(is_visible & is_cached[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        zero = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(score - zero[:, None])
        kept = tl.exp2(best - zero)
        value = tl.load(
            keys[:, None] + (BLOCK_SIZE * ROW + d)[None, :],
            mask=is_cached[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        mass = mass * kept + tl.sum(weight, 1)
        total = tl.dot(
            weight.to(queries.dtype),
            value.to(queries.dtype),
            total * kept[:, None],
            input_precision="ieee",
        )
        best = new_best
    return best, mass, total


@triton.jit(do_not_specialize=["num_requests", "is_split", "num_tokens"])
def attend(
    q,  # [T, KVH * GROUP, HEAD_DIM]
    cache,  # [num_blocks, 2, BLOCK_SIZE, KVH, HEAD_DIM]
    out,  # like q
    table,  # [R, max_blocks] int32
    rows,  # [>= R + 1, 2] int32: (first token, KV length) of each request
    totals,  # [num_ranges, T, H, HEAD_DIM] float32: rows of a range, not divided by their mass
    sums,  # [num_ranges, T, H, 2] float32: (best score, mass) of a range
    scale,  # of scores, times log2(e)
    num_requests,
    num_tokens,  # T
    is_split,
    q_token,  # strides
    q_head,
    out_token,
    out_head,
    table_row,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANGE: tl.constexpr,
):
    """Attention of one tile of rows over all ranges, or if `is_split` over range program_id(2)."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    request, start, first, num_queries, seq_len = _find_tile(rows, num_requests, TOKENS)
    range_index = tl.program_id(2)
    # What the tile's last row sees. All of it is in the cache; what is behind may be anything.
    num_visible = seq_len - num_queries + tl.minimum(first + TOKENS, num_queries)
    begin = range_index * RANGE
    if first >= num_queries or begin >= num_visible:
        return
    end = num_visible
    if is_split:
        end = tl.minimum(end, begin + RANGE)

    kv_head = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    query = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (query < num_queries)
    token = (start + query).to(tl.int64)
    position = seq_len - num_queries + query
    d = tl.arange(0, D)
    mask = is_row[:, None] & (d < HEAD_DIM)[None, :]
    place = q + (token * q_token + head * q_head)[:, None] + d[None, :]
    queries = tl.load(place, mask=mask, other=0.0)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, D], tl.float32)
    for range_start in range(begin, end, RANGE):
        range_best, range_mass, range_total = _sum_range(
            queries,
            cache + kv_head * HEAD_DIM,
            table + request * table_row,
            position,
            range_start,
            tl.minimum(range_start + RANGE, end),
            scale,
            NUM_KV_HEADS * HEAD_DIM,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_N,
        )
        best, mass, total = _fold(best, mass, total, range_best, range_mass, range_total)

    if is_split:
        NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
        entry = (range_index.to(tl.int64) * num_tokens + token) * NUM_HEADS + head
        tl.store(sums + 2 * entry, best, mask=is_row)
        tl.store(sums + 2 * entry + 1, mass, mask=is_row)
        tl.store(totals + entry[:, None] * HEAD_DIM + d[None, :], total, mask=mask)
    else:
        place = out + (token * out_token + head * out_head)[:, None] + d[None, :]
        tl.store(place, (total / mass[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def merge_ranges(
    out,
    rows,
    totals,
    sums,
    num_requests,
    num_tokens,
    out_token,
    out_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RANGE: tl.constexpr,
):
    """Fold what `attend` stored of each range, for the same tiles of rows. Arguments as there."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    _, start, first, num_queries, seq_len = _find_tile(rows, num_requests, TOKENS)
    if first >= num_queries:
        return
    num_visible = seq_len - num_queries + tl.minimum(first + TOKENS, num_queries)
    row = tl.arange(0, BLOCK_M)
    query = first + row // GROUP
    head = tl.program_id(1) * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (query < num_queries)
    token = (start + query).to(tl.int64)
    d = tl.arange(0, D)
    mask = is_row[:, None] & (d < HEAD_DIM)[None, :]

    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, D], tl.float32)
    for range_index in range((num_visible + RANGE - 1) // RANGE):
        entry = (range_index * num_tokens + token) * NUM_HEADS + head
        range_best = tl.load(sums + 2 * entry, mask=is_row, other=0.0)
        range_mass = tl.load(sums + 2 * entry + 1, mask=is_row, other=1.0)
        range_total = tl.load(totals + entry[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        best, mass, total = _fold(best, mass, total, range_best, range_mass, range_total)
    place = out + (token * out_token + head * out_head)[:, None] + d[None, :]
    tl.store(place, (total / mass[:, None]).to(out.dtype.element_ty), mask=mask)
