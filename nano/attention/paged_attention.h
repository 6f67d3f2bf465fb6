// paged_attention<T>: causal attention over a paged KV cache of T (float or BFloat16), for ragged batches of
// any mix of chunk, decode and draft rows. Writes the step's keys and values, then attends: one op.
//
// A row's result is the same bits in any batch, chunk, block size and number of threads; for the order
// of its sums see attention_rows.h.
//
// Cache: [num_blocks][KVH][2][block_size * D]. Of the two, keys come first, in panels
// of `width` positions, [block_size / width][D][width]; then values, [block_size][D]. The width is 16 if
// that divides block_size, so that panels are read where they lie; else a block is one panel, and copied.
#pragma once

#include <atomic>
#include <memory>

#include "attention_rows.h"
#include "attention_tasks.h"
#include "op.h"
#include "threads.h"

namespace {

constexpr double LOG2_E = 1.4426950408889634;
constexpr long WRITTEN_TOGETHER = 32;  // tokens that one task writes

template <class T>
struct Cache {
  T* data;
  long kv_heads, block_size, width, dim;

  // Keys of a block; its values follow `size()` later.
  T* keys(long block, long head) const { return data + (block * kv_heads + head) * 2 * size(); }
  long size() const { return block_size * dim; }
};

// One call of the op.
template <class T>
struct Step {
  const float *q, *k, *v;                 // [T][H][D], [T][KVH][D], [T][KVH][D]
  long q_stride, k_stride, v_stride;      // between tokens
  float* out;                             // [T][H][D]
  Cache<T> cache;
  const int32_t* block_table;             // [R][table_stride]
  const int64_t* slots;                   // [T]
  const int32_t *query_start, *seq_lens;  // [R + 1], [R]
  long num_requests, table_stride, num_heads;
  float scale;  // of scores whose power of two is taken
};

// Float memory of a thread that starts at a cache line: vectors across two lines cost two loads.
class Memory {
 public:
  float* at_least(long num_floats) {
    if ((long)floats_.size() < num_floats + 16) floats_.resize(num_floats + 16);
    const long misplaced = reinterpret_cast<uintptr_t>(floats_.data()) / sizeof(float) % 16;
    return floats_.data() + (16 - misplaced) % 16;
  }

 private:
  std::vector<float> floats_;
};

// What a task works in.
struct Scratch {
  float* q;       // [rows][D], scaled
  float* scores;  // [MAX_ROWS][RANGE]; later weights
  float* panels;  // [2 * RANGE * D]: copied keys and values
  State state, next;
};

Scratch scratch_of_thread(long num_rows, long dim) {
  static thread_local Memory memory;
  const long q = aligned(num_rows * dim), scores = MAX_ROWS * RANGE, panels = 2 * RANGE * dim;
  const long state = state_size(num_rows, dim);
  float* start = memory.at_least(q + scores + panels + 2 * state);
  float* states = start + q + scores + panels;
  return {start, start + q, start + q + scores, state_at(states, num_rows, dim),
          state_at(states + state, num_rows, dim)};
}

template <class T>
void write_token(const Step<T>& step, long token) {
  const Cache<T>& cache = step.cache;
  const long slot = step.slots[token], dim = cache.dim, width = cache.width;
  if (slot < 0) return;  // padding
  const long block = slot / cache.block_size, offset = slot % cache.block_size;
  for (long head = 0; head < cache.kv_heads; head++) {
    const float* k = step.k + token * step.k_stride + head * dim;
    const float* v = step.v + token * step.v_stride + head * dim;
    T* keys = cache.keys(block, head);
    T* values = keys + cache.size();
    for (long d = 0; d < dim; d++) keys[Format<T>::of_key(offset, d, width, dim)] = from_float<T>(k[d]);
    for (long d = 0; d < dim; d++) values[Format<T>::of_value(offset, d, width, dim)] = from_float<T>(v[d]);
  }
}

template <class T>
void write_tokens(const Step<T>& step) {
  const long num_tokens = step.query_start[step.num_requests];
  parallel_for((num_tokens + WRITTEN_TOGETHER - 1) / WRITTEN_TOGETHER, [&](long task) {
    const long first = task * WRITTEN_TOGETHER;
    for (long t = first; t < std::min(first + WRITTEN_TOGETHER, num_tokens); t++)
      write_token(step, t);
  });
}

template <class T>
inline void widen(const T* from, long count, float* to) {
  for (long i = 0; i < count; i++) to[i] = to_float(from[i]);
}

// The pages of one request for one KV head.
template <class T>
struct Pages {
  const Cache<T>& cache;
  const int32_t* blocks;
  long head;

  // The panel of keys that starts at `position`, if panels have the width for it.
  const T* panel(long position) const {
    return keys_of(position) + position % cache.block_size * cache.dim;
  }

  // Keys of `count` positions from `start` on, in panels of 16 floats. A block is one panel.
  void copy_keys(long start, long count, float* to) const {
    const long dim = cache.dim, width = cache.width;
    for (long i = 0; i < count;) {
      const long offset = (start + i) % width;
      const T* from = keys_of(start + i) + offset;
      const long run = std::min({width - offset, PANEL - i % PANEL, count - i});
      float* panel = to + i / PANEL * PANEL * dim + i % PANEL;
      for (long d = 0; d < dim; d++) widen(from + d * width, run, panel + d * PANEL);
      i += run;
    }
  }

  void copy_values(long start, long count, float* to) const {
    for (long i = 0; i < count; i++)
      widen(panel(start + i) + cache.size(), cache.dim, to + i * cache.dim);
  }

  void copy_as_they_are(long start, long count, T* keys, T* values) const {
    const long dim = cache.dim, width = cache.width;
    for (long i = 0; i < count; i++) {
      const T* from = keys_of(start + i);
      const long at = (start + i) % cache.block_size;
      for (long d = 0; d < dim; d++) {
        keys[Format<T>::of_key(i, d, PANEL, dim)] = from[Format<T>::of_key(at, d, width, dim)];
        values[Format<T>::of_value(i, d, PANEL, dim)] =
            from[cache.size() + Format<T>::of_value(at, d, width, dim)];
      }
    }
  }

 private:
  const T* keys_of(long position) const {
    return cache.keys(blocks[position / cache.block_size], head);
  }
};

// body(std::integral_constant<int, n>, first row) for blocks of n rows. They are dealt out evenly: 7 are
// 4 + 3, never 6 + 1.
template <class Body>
inline void for_row_blocks(long first, long last, Body&& body) {
  while (first < last) {
    const long left = last - first, num_blocks = (left + MAX_ROWS - 1) / MAX_ROWS;
    const long num_rows = (left + num_blocks - 1) / num_blocks;
    switch (num_rows) {
      case 1: body(std::integral_constant<int, 1>{}, first); break;
      case 2: body(std::integral_constant<int, 2>{}, first); break;
      case 3: body(std::integral_constant<int, 3>{}, first); break;
      case 4: body(std::integral_constant<int, 4>{}, first); break;
      case 5: body(std::integral_constant<int, 5>{}, first); break;
      default: body(std::integral_constant<int, MAX_ROWS>{}, first);
    }
    first += num_rows;
  }
}

// Panels of a range in the order of their use: `num_panels` of keys, their values, and the AHEAD keys of the
// next range, for no more than to prefetch them.
template <class T>
struct Panels {
  const T* panels[2 * RANGE / PANEL + AHEAD];
  long num_panels;

  const T* const* keys() const { return panels; }
  const T* const* values() const { return panels + num_panels; }
};

// Those of the positions [start, last_seen] where they lie in the cache. Beyond there may be no block.
template <class T>
Panels<T> find_panels(const Pages<T>& pages, long start, long num_panels, long last_seen) {
  Panels<T> found;
  found.num_panels = num_panels;
  for (long i = 0; i < num_panels; i++) {
    found.panels[i] = pages.panel(start + i * PANEL);
    found.panels[num_panels + i] = found.panels[i] + pages.cache.size();
  }
  for (long i = 0; i < AHEAD; i++) {
    const long position = start + (num_panels + i) * PANEL;
    found.panels[2 * num_panels + i] =
        position <= last_seen ? pages.panel(position) : found.panels[num_panels - 1];
  }
  return found;
}

// The same in copies.
template <class T, class Copy = typename Format<T>::Copy>
Panels<Copy> copy_panels(const Pages<T>& pages, long start, long num_panels, long num_seen, Copy* copies) {
  const long size = PANEL * pages.cache.dim;
  Panels<Copy> found;
  found.num_panels = num_panels;
  for (long i = 0; i < 2 * num_panels; i++) found.panels[i] = copies + i * size;
  for (long i = 0; i < AHEAD; i++) found.panels[2 * num_panels + i] = copies;
  if constexpr (std::is_same_v<Copy, float>) {
    pages.copy_keys(start, num_seen, copies);
    pages.copy_values(start, num_seen, copies + num_panels * size);
  } else {
    pages.copy_as_they_are(start, num_seen, copies, copies + num_panels * size);
  }
  return found;
}

// What a tile's rows gather in the range at `start`, into `state`; a few rows at a time, whose scores stay
// in the first-level cache. Rows that see nothing of it are left alone.
template <class T>
void attend_panels(const Tile& tile, const Panels<T>& panels, long start, long dim, const Scratch& scratch,
                   const State& state) {
  auto num_seen = [&](long row) { return std::min(tile.last_position(row) + 1 - start, RANGE); };
  for_row_blocks(tile.first_row_that_sees(start), tile.num_rows(), [&](auto num_rows, long row) {
    float *scores = scratch.scores, *sums = state.sums + row * dim;
    const long last_panel = (num_seen(row + num_rows - 1) - 1) / PANEL;
    score<num_rows>(scratch.q + row * dim, panels.keys(), last_panel + 1, dim, scores);
    for (long r = 0; r < num_rows; r++) {
      soften(scores + r * RANGE, num_seen(row + r), state.best[row + r], state.mass[row + r]);
      Format<T>::store_weights(scores + r * RANGE);
    }
    std::fill(sums, sums + num_rows * dim, 0.0f);
    add_seen<num_rows>(scores, panels.values(), [&](long r) { return num_seen(row + r); }, dim, sums);
  });
}

template <class T>
void attend(const Step<T>& step, const Tile& tile, long head, long range, const Scratch& scratch,
            const State& state) {
  const long dim = step.cache.dim;
  const Pages<T> pages{step.cache, step.block_table + tile.request * step.table_stride, head};
  const long start = range * RANGE, last_seen = tile.last_position(tile.num_rows() - 1);
  const long num_seen = std::min(last_seen + 1 - start, RANGE), num_panels = (num_seen + PANEL - 1) / PANEL;
  using Copy = typename Format<T>::Copy;
  if (step.cache.width == PANEL)
    attend_panels(tile, find_panels(pages, start, num_panels, last_seen), start, dim, scratch, state);
  else
    attend_panels(tile,
                  copy_panels(pages, start, num_panels, num_seen, reinterpret_cast<Copy*>(scratch.panels)),
                  start, dim, scratch, state);
}

// The attention of one step, task by task.
template <class T>
class Job {
 public:
  Job(const Step<T>& step, const Tasks& tasks, float* states)
      : step_(step), tasks_(tasks), states_(states),
        num_done_(new std::atomic<long>[tasks.splits.size() * step.cache.kv_heads]()) {}

  void run_piece(const Piece& piece, long head) const {
    const Tile& tile = piece.tile;
    const Scratch scratch = scratch_of_thread(tile.num_rows(), step_.cache.dim);
    load_queries(tile, head, scratch.q);
    if (piece.split >= 0) return run_part(piece, head, scratch);
    gather(tile, head, 0, scratch, scratch.state);
    for (long range = 1; range < piece.end_range; range++) {
      gather(tile, head, range, scratch, scratch.next);
      take_in(tile, range, scratch.state, scratch.next);
    }
    store_outputs(tile, head, scratch.state);
  }

 private:
  // A piece of a tile that others work on, too.
  void run_part(const Piece& piece, long head, const Scratch& scratch) const {
    const Tile& tile = piece.tile;
    const Split& split = tasks_.splits[piece.split];
    const long dim = step_.cache.dim, size = state_size(tile.num_rows(), dim);
    auto state = [&](long range) {
      const long place = split.first_state + (head * tile.num_ranges() + range) * size;
      return state_at(states_ + place, tile.num_rows(), dim);
    };
    for (long range = piece.first_range; range < piece.end_range; range++)
      gather(tile, head, range, scratch, state(range));
    std::atomic<long>& num_done = num_done_[piece.split * step_.cache.kv_heads + head];
    if (num_done.fetch_add(1, std::memory_order_acq_rel) + 1 < split.num_pieces) return;
    for (long range = 1; range < tile.num_ranges(); range++)
      take_in(tile, range, state(0), state(range));
    store_outputs(tile, head, state(0));
  }

  void gather(const Tile& tile, long head, long range, const Scratch& scratch,
              const State& state) const {
    attend(step_, tile, head, range, scratch, state);
  }

  void take_in(const Tile& tile, long range, const State& state, const State& next) const {
    merge(state, next, tile.first_row_that_sees(range * RANGE), tile.num_rows(), step_.cache.dim);
  }

  void load_queries(const Tile& tile, long head, float* q) const {
    const long dim = step_.cache.dim, group = tile.group;  // of heads that lie side by side
    for (long r = 0; r < tile.num_rows(); r++, q += dim) {
      const float* token = step_.q + (tile.first_token + r / group) * step_.q_stride;
      Format<T>::store_query(token + (head * group + r % group) * dim, step_.scale, dim, q);
    }
  }

  void store_outputs(const Tile& tile, long head, const State& state) const {
    const long dim = step_.cache.dim;
    for (long r = 0; r < tile.num_rows(); r++) {
      const long token = tile.first_token + r / tile.group;
      float* to = step_.out + (token * step_.num_heads + head * tile.group + r % tile.group) * dim;
      for (long d = 0; d < dim; d++) to[d] = state.sums[r * dim + d] / state.mass[r];
    }
  }

  const Step<T>& step_;
  const Tasks& tasks_;
  float* states_;
  std::unique_ptr<std::atomic<long>[]> num_done_;  // pieces, [splits][KVH]
};

template <class T>
void run(const Step<T>& step) {
  write_tokens(step);  // all of them first: requests may share what they write
  const long kv_heads = step.cache.kv_heads;
  const Tasks tasks = make_tasks(
      make_tiles(step.query_start, step.seq_lens, step.num_requests, step.num_heads / kv_heads),
      kv_heads, step.cache.dim, nano_num_threads());
  static thread_local Memory states;
  const Job job(step, tasks, states.at_least(tasks.states_size));
  parallel_for((long)tasks.pieces.size() * kv_heads, [&](long task) {
    job.run_piece(tasks.pieces[task / kv_heads], task % kv_heads);
  });
}

// Tokens may lie apart (in a fused projection), the heads of one may not.
const float* tokens_of(const Tensor& x, long num_heads, long dim) {
  check(x.size(1) == num_heads && x.size(2) == dim && x.stride(2) == 1 &&
            (num_heads == 1 || x.stride(1) == dim),
        "paged_attention takes tokens of contiguous heads");
  return x.const_data_ptr<float>();
}

template <class T>
void paged_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& kv_cache,
                     const Tensor& out, const Tensor& block_table, const Tensor& slots,
                     const Tensor& query_start, const Tensor& seq_lens, int64_t block_size,
                     double scale) {
  const long num_heads = q.size(1), kv_heads = k.size(1), dim = q.size(2);
  check(out.is_contiguous(), "paged_attention fills a contiguous tensor");
  check(kv_cache.element_size() == sizeof(T), "a cache of another type");
  const Cache<T> cache{static_cast<T*>(kv_cache.mutable_data_ptr()), kv_heads, block_size,
                       block_size % PANEL ? block_size : PANEL, dim};
  run(Step<T>{
      tokens_of(q, num_heads, dim), tokens_of(k, kv_heads, dim), tokens_of(v, kv_heads, dim),
      q.stride(0), k.stride(0), v.stride(0), out.mutable_data_ptr<float>(), cache,
      block_table.const_data_ptr<int32_t>(), slots.const_data_ptr<int64_t>(),
      query_start.const_data_ptr<int32_t>(), seq_lens.const_data_ptr<int32_t>(), seq_lens.size(0),
      block_table.stride(0), num_heads, (float)(scale * LOG2_E)});
}

// Define the op for caches of T in this file's library.
#define NANO_PAGED_ATTENTION(NAME, T)                                                               \
  static const Ops ops{                                                                             \
      {NAME                                                                                         \
       "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor(b!) out, Tensor block_table, "   \
       "Tensor slots, Tensor query_start, Tensor seq_lens, int block_size, float scale) -> ()",     \
       op<&paged_attention<T>>}};

}  // namespace
