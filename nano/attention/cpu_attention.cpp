#define NANO_LANES8  // until rewritten for any width
// Causal attention over a paged KV cache, for ragged batches of any mix of chunk, decode and draft rows.
//
// The order of every sum is the point: a query row meets the keys in tiles of 16 absolute positions
// from position 0 on, with an online softmax, whatever the block size, its batch, its chunk or the
// number of threads. Its result is the same bits in every case.
//
// Cache: [num_blocks][2][KVH][block_size][D] floats; [.., 0] are keys, [.., 1] values.
#include <algorithm>
#include <cmath>
#include <vector>

#include "vector.h"

namespace {

static inline float sum(Vec v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

constexpr long TILE = 16;        // positions per online-softmax step; part of the numerics
constexpr long QUERY_TILE = 4;   // query tokens that share the keys of one pass; not part of them
constexpr int CHUNK = 8;         // vectors of the head that are accumulated at a time, in registers

struct Cache {
  float* data;
  long block_size, kv_heads, dim;

  // The row of `position` among keys (kind 0) or values (kind 1) of one head.
  float* row(long block, long kind, long head, long offset) const {
    return data + (((block * 2 + kind) * kv_heads + head) * block_size + offset) * dim;
  }
};

// [a0+..+a7, ..., h0+..+h7]: sums of eight vectors by a butterfly.
inline Vec sums_of_eight(const Vec* v) {
  Vec pairs[4], quads[2];
  for (int i = 0; i < 4; i++) {
    Vec a = v[2 * i], b = v[2 * i + 1];
    pairs[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
               __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 2; i++) {
    Vec a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return __builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

// e^x for x <= 0, to about 1e-7; NaN stays NaN. (Cephes' polynomial.)
inline Vec exponential(Vec x) {
  const Vec lowest = broadcast(-87.0f);
  x = x < lowest ? lowest : x;
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = (x * broadcast(1.44269504f) + magic) - magic;
  Vec r = x - n * broadcast(0.693359375f);
  r = r - n * broadcast(-2.12194440e-4f);
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + broadcast(1.3981999507e-3f);
  p = p * r + broadcast(8.3334519073e-3f);
  p = p * r + broadcast(4.1665795894e-2f);
  p = p * r + broadcast(1.6666665459e-1f);
  p = p * r + broadcast(0.5f);
  p = (r * r) * p + (r + broadcast(1.0f));
  IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return p * reinterpret_cast<Vec>(exponent);
}

const IntVec LANE_INDEX = {0, 1, 2, 3, 4, 5, 6, 7};

// The running softmax of one query row.
struct Row {
  float best = -INFINITY;
  float mass = 0.0f;
  long last;  // the last position it sees: its own
};

// Scores of one row against the eight keys at `keys`.
template <int DIM>
inline Vec scores_of_eight(const float* q, const float* const* keys, long dim) {
  const long d = DIM ? DIM : dim;
  Vec partial[8];
  for (int t = 0; t < 8; t++) {
    Vec product = load(q) * load(keys[t]);
    for (long i = LANES; i < d; i += LANES) product += load(q + i) * load(keys[t] + i);
    partial[t] = product;
  }
  return sums_of_eight(partial);
}

// out = out * shrink + the weighted values, COUNT vectors from dimension `at` on.
template <int COUNT>
inline void add_values(float* out, const float* const* values, long at, const float* weights,
                       long visible, float shrink) {
  Vec sums[COUNT];
#pragma GCC unroll 8
  for (int c = 0; c < COUNT; c++) sums[c] = load(out + c * LANES) * broadcast(shrink);
  for (long t = 0; t < visible; t++) {
    const Vec weight = broadcast(weights[t]);
#pragma GCC unroll 8
    for (int c = 0; c < COUNT; c++) sums[c] += weight * load(values[t] + at + c * LANES);
  }
#pragma GCC unroll 8
  for (int c = 0; c < COUNT; c++) store(out + c * LANES, sums[c]);
}

// Let `row` attend to the positions [start, start + TILE) that it sees. out: [D] so far, unscaled.
template <int DIM>
inline void attend_to_tile(Row& row, const float* q, float* out, long start,
                           const float* const* keys, const float* const* values, long dim) {
  const long d = DIM ? DIM : dim;
  const long visible = std::min(TILE, row.last + 1 - start);
  Vec low = scores_of_eight<DIM>(q, keys, dim), high = scores_of_eight<DIM>(q, keys + 8, dim);
  const IntVec seen_low = LANE_INDEX < (int32_t)visible;
  const IntVec seen_high = LANE_INDEX + 8 < (int32_t)visible;
  const Vec hidden = broadcast(-INFINITY);
  low = seen_low ? low : hidden;
  high = seen_high ? high : hidden;
  const Vec larger = low > high ? low : high;
  float best = row.best;
  for (int i = 0; i < LANES; i++) best = larger[i] > best ? larger[i] : best;
  low = seen_low ? exponential(low - broadcast(best)) : broadcast(0.0f);
  high = seen_high ? exponential(high - broadcast(best)) : broadcast(0.0f);
  const float shrink = best == row.best ? 1.0f : exponential(broadcast(row.best - best))[0];
  row.best = best;
  row.mass = row.mass * shrink + sum(low + high);
  float weights[TILE];
  store(weights, low);
  store(weights + LANES, high);
  long i = 0;
  for (; i + CHUNK * LANES <= d; i += CHUNK * LANES)
    add_values<CHUNK>(out + i, values, i, weights, visible, shrink);
  for (; i < d; i += LANES) add_values<1>(out + i, values, i, weights, visible, shrink);
}

struct Step {
  const float* q;  // [T][H][D]
  float* out;      // [T][H][D]
  Cache cache;
  const int32_t* table;        // [R][max_blocks]
  const int32_t* query_start;  // [R + 1]
  const int32_t* seq_lens;     // [R]
  long max_blocks, num_heads;
  float scale;
};

struct Task {
  int32_t request, first_query;  // the latter counted from the request's first query
};

template <int DIM>
void run_task(const Step& step, const Task& task, long head) {
  const long dim = step.cache.dim, block_size = step.cache.block_size;
  const long group = step.num_heads / step.cache.kv_heads;
  const long start = step.query_start[task.request];
  const long num_queries = step.query_start[task.request + 1] - start;
  const long seq_len = step.seq_lens[task.request];
  const long count = std::min(QUERY_TILE, num_queries - task.first_query);
  const int32_t* blocks = step.table + task.request * step.max_blocks;

  // Rows are (query token, query head of the group); they share every key and value.
  const long num_rows = count * group;
  std::vector<Row> rows(num_rows);
  std::vector<float> q(num_rows * dim), out(num_rows * dim, 0.0f);
  for (long r = 0; r < num_rows; r++) {
    const long token = task.first_query + r / group;
    rows[r].last = seq_len - num_queries + token;
    const float* from = step.q + ((start + token) * step.num_heads + head * group + r % group) * dim;
    for (long i = 0; i < dim; i++) q[r * dim + i] = from[i] * step.scale;
  }
  const long end = rows[num_rows - 1].last + 1;
  for (long position = 0; position < end; position += TILE) {
    const float *keys[TILE], *values[TILE];
    for (long t = 0; t < TILE; t++) {
      // Past the end any row will do: its score is masked. It must be one that was written.
      const long p = std::min(position + t, end - 1);
      keys[t] = step.cache.row(blocks[p / block_size], 0, head, p % block_size);
      values[t] = step.cache.row(blocks[p / block_size], 1, head, p % block_size);
    }
    for (long r = 0; r < num_rows; r++)
      if (position <= rows[r].last)
        attend_to_tile<DIM>(rows[r], &q[r * dim], &out[r * dim], position, keys, values, dim);
  }
  for (long r = 0; r < num_rows; r++) {
    const long token = start + task.first_query + r / group;
    float* to = step.out + (token * step.num_heads + head * group + r % group) * dim;
    for (long i = 0; i < dim; i++) to[i] = out[r * dim + i] / rows[r].mass;
  }
}

}  // namespace

extern "C" {

// k, v: [T][KVH][D]; slots: [T], block * block_size + offset, negative for padding.
void nano_write_kv(const float* k, const float* v, float* cache_data, const int64_t* slots,
                   long num_tokens, long kv_heads, long block_size, long dim) {
  const Cache cache{cache_data, block_size, kv_heads, dim};
  for (long t = 0; t < num_tokens; t++) {
    if (slots[t] < 0) continue;
    const long block = slots[t] / block_size, offset = slots[t] % block_size;
    for (long h = 0; h < kv_heads; h++) {
      const long from = (t * kv_heads + h) * dim;
      std::memcpy(cache.row(block, 0, h, offset), k + from, dim * sizeof(float));
      std::memcpy(cache.row(block, 1, h, offset), v + from, dim * sizeof(float));
    }
  }
}

void nano_attention(const float* q, float* out, float* cache, const int32_t* table,
                    const int32_t* query_start, const int32_t* seq_lens, long num_requests,
                    long max_blocks, long num_heads, long kv_heads, long block_size, long dim,
                    float scale) {
  const Step step{q,          out,       {cache, block_size, kv_heads, dim}, table, query_start,
                  seq_lens,   max_blocks, num_heads,                          scale};
  std::vector<Task> tasks;
  for (long b = 0; b < num_requests; b++)
    for (int32_t first = 0; first < query_start[b + 1] - query_start[b]; first += QUERY_TILE)
      tasks.push_back({(int32_t)b, first});
  const long num_tasks = (long)tasks.size();
#pragma omp parallel for collapse(2) schedule(dynamic, 1)
  for (long i = num_tasks - 1; i >= 0; i--)  // long sequences come last in a batch: start with them
    for (long h = 0; h < kv_heads; h++) switch (dim) {
        case 64: run_task<64>(step, tasks[i], h); break;
        case 128: run_task<128>(step, tasks[i], h); break;
        default: run_task<0>(step, tasks[i], h);
      }
}
}
