// linear<W>: y[M, N] = x[M, K] @ w[N, K]^T + bias, for any number of rows M and any weight format W.
//
// The order of the sum is the point: each output is ONE chain of fused multiply-adds over k = 0 .. K-1
// from zero, and the bias is added last, whatever M is, however rows, outputs and inputs are cut, on any
// number of threads and at any vector width. A row's result is therefore the same bits alone or among
// thousands, and a quantised matrix gives the bits of its dequantised float32 matrix.
//
// Two ways along that chain:
//   few rows    each vector of weights is decoded in registers and multiplied by all rows at once: one
//               pass over the weights, at the speed of memory. More rows go tile by tile, the later ones
//               with the weights in the second-level cache.
//   many rows   with registers for few rows only (AVX2), decoding would cost as much as multiplying. A chunk
//               of inputs of a tile of outputs is decoded once into a float32 scratch, which stays in the
//               first-level cache while tile after tile of rows is multiplied by it: the speed of the
//               multipliers, whatever the format.
//
// A format is a class W with
//   static constexpr int STEP;                  inputs decoded at a time: 1, 2, 4, 8 or 16
//   struct Column { const uint32_t* words; ...} where LANES neighbouring outputs lie, and their scales
//   Column column(long output, long k) const;   that of [output, output + LANES), from input k on
//   long run_end(long k) const;                 a column made at k serves the inputs [k, run_end(k)), a
//                                               group that shares scales; any number >= K without groups
//   static void decode(const Column&, long k, Vec (&w)[STEP]);   weights of the inputs [k, k + STEP)
// Every format stores [N / 64][K / STEP][64] words of 32 bits, a word for STEP inputs of an output, padded to
// whole panels of 64 outputs and whole STEPs: what lies beyond N or K is decoded and then not used. A panel
// is one stream of memory, and a step along it is four cache lines: enough chains of sums to hide the
// latency of an addition. (Four streams of 16 outputs each reached two thirds of its bandwidth.)
// `words` of a column are those of its first output and of input 0. `output` is a multiple of LANES, `k` of
// STEP, and so is run_end(k) unless it is >= K. All of these are to be NANO_INLINE.
#pragma once

#include <array>
#include <utility>

#include "layers/linear_operands.h"
#include "native/threads.h"

namespace nano_linear {

#if defined(NANO_AVX512)
constexpr int SUMS = 28;  // that fit the registers, beside weights and a factor
constexpr bool HAS_OPERAND_FACTORS = true;
constexpr int FEW_ROWS = 16;  // hide the decoding of a weight: more need no other way
constexpr bool HAS_SCRATCH = false;
constexpr long PASS_STEPS = 128;      // steps of a panel that all passes take before the next ones: 32 KB,
constexpr bool FETCHES_TWICE = true;  // fit for the second-level cache, too many for the first-level one
#else
constexpr int SUMS = 12;
constexpr bool HAS_OPERAND_FACTORS = false;
constexpr int FEW_ROWS = 12;
constexpr bool HAS_SCRATCH = true;  // for many rows
constexpr long PASS_STEPS = 32;  // shared by more passes: the first-level cache has to keep them
constexpr bool FETCHES_TWICE = false;
#endif

// ---- few rows ----

constexpr long NEAR_STEPS = 16;        // that a pass fetches ahead, into the first-level cache
constexpr long FAR_STEPS = 32;         // and into the second-level one, if no other pass shares its panel
constexpr int MIN_FAR_USES = 8;        // of a word: with fewer, memory is waited for whatever is fetched
constexpr long MIN_WEIGHTS = 1 << 14;  // a task should multiply so many, or claiming it costs more

// Vectors of a panel that one pass takes: as many as there are registers for.
constexpr int vectors_at_once(int rows) {
  int vectors = PANEL_VECTORS;
  while (vectors > 1 && vectors * rows > SUMS) vectors /= 2;
  return vectors;
}

// Vectors that one load of a factor serves. With AVX-512 it is an operand of the multiplication and costs
// nothing; elsewhere two share it if the registers hold their weights, too.
constexpr int factor_sharers(int rows, int vectors, int step) {
  if (HAS_OPERAND_FACTORS || vectors == 1) return 1;
  return vectors * rows + 2 * step + 1 <= 16 ? 2 : 1;
}

// One pass: ROWS rows x [input][ROWS] times VECTORS vectors of outputs, inputs [k, k_end), onto `carried`.
// It fetches as many bytes as it reads, from `far` on: with each step, `far_step` bytes further.
template <class W, int ROWS, int VECTORS>
NANO_INLINE void pass(const W& weights, const float* x, long output, long k, long k_end, const char* far,
                      long far_step, Vec (&carried)[VECTORS][ROWS]) {
  constexpr int STEP = W::STEP, SHARERS = factor_sharers(ROWS, VECTORS, STEP);
  constexpr bool FETCHES_FAR = !FETCHES_TWICE || ROWS * STEP >= MIN_FAR_USES;
  // Weights that nobody reads again in this step are kept out of the other caches (with so few rows in a
  // tile there is one tile), or each would turn out one that the next step could have found there.
  constexpr bool IS_ONLY_PASS = VECTORS == PANEL_VECTORS;
  static_assert(!FETCHES_TWICE || vectors_at_once(FEW_ROWS / 2) < PANEL_VECTORS);
  Vec sums[VECTORS][ROWS];  // a copy, which is kept in registers
  std::memcpy(sums, carried, sizeof sums);
  for (long end; k < k_end; k = end) {
    end = std::min(weights.run_end(k), k_end);
    typename W::Column columns[VECTORS];
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) columns[v] = weights.column(output + v * LANES, k);
    for (; k < end; k += STEP, far += far_step)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v += SHARERS) {
        if (v * LANES * 4 % LINE == 0) {
          if (FETCHES_TWICE)
            __builtin_prefetch(columns[v].words + (k / STEP + NEAR_STEPS) * PANEL, 0, IS_ONLY_PASS ? 0 : 3);
          if (FETCHES_FAR) __builtin_prefetch(far + v * LANES * 4, 0, FETCHES_TWICE ? 2 : 3);
        }
        asm volatile("" ::: "memory");  // or all factors are kept for the next vector, and sums are spilled
        Vec w[SHARERS][STEP];
#pragma GCC unroll 16
        for (int i = 0; i < SHARERS; i++) W::decode(columns[v + i], k, w[i]);
#pragma GCC unroll 16
        for (int s = 0; s < STEP; s++)
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++) {
            const Vec factor = broadcast(x[(k + s) * ROWS + r]);
#pragma GCC unroll 16
            for (int i = 0; i < SHARERS; i++)
              sums[v + i][r] += factor * w[i][s];  // fused, here as everywhere
          }
      }
  }
  std::memcpy(carried, sums, sizeof sums);
}

// The same for the last inputs, fewer than STEP, onto sums [vectors][rows]. Apart, and one for any number of
// rows: few matrices have any.
template <class W>
static __attribute__((noinline)) void last_inputs(const W& weights, const float* x, long output, long k,
                                                  long count, long vectors, long rows, Vec* sums) {
  for (long v = 0; v < vectors; v++, sums += rows) {
    Vec w[W::STEP];
    W::decode(weights.column(output + v * LANES, k), k, w);
    for (long s = 0; s < count; s++)
      for (long r = 0; r < rows; r++) sums[r] += broadcast(x[(k + s) * rows + r]) * w[s];
  }
}

// ROWS rows x [input][ROWS], `row` the first, times the outputs [output, end), a panel or a half of one that
// takes passes of its own.
template <class W, int ROWS>
static void few_rows(const W& weights, const Operands& ops, const float* x, long row, long output,
                     long end) {
  constexpr int STEP = W::STEP, VECTORS = vectors_at_once(ROWS), MAX_PASSES = PANEL_VECTORS / VECTORS;
  constexpr long WIDTH = VECTORS * LANES;
  Vec sums[MAX_PASSES][VECTORS][ROWS] = {};
  // Several passes share a stretch. Each fetches its part of the next one, so that memory is read as one
  // stream; alone, half a panel fetches what it will read itself.
  const int passes = (int)((end - output) / WIDTH);
  const long whole = ops.K / STEP * STEP;
  const long stretch = MAX_PASSES == 1 ? whole : PASS_STEPS * STEP;
  const long ahead = (MAX_PASSES == 1 ? FAR_STEPS : PASS_STEPS) * PANEL * 4;
  const long far_step = passes == MAX_PASSES ? WIDTH * 4 : PANEL * 4;
  const long far_pass = passes == MAX_PASSES ? ahead / MAX_PASSES : WIDTH * 4;
  for (long k = 0; k < whole; k += stretch) {
    const uint32_t* words = weights.column(output, k).words + k / STEP * PANEL;
    const char* far = reinterpret_cast<const char*>(words) + ahead;
    for (int p = 0; p < passes; p++)
      pass(weights, x, output + p * WIDTH, k, std::min(k + stretch, whole), far + p * far_pass, far_step,
           sums[p]);
  }
  for (int p = 0; p < passes; p++) {
    const long at = output + p * WIDTH;
    if (whole < ops.K) last_inputs(weights, x, at, whole, ops.K - whole, VECTORS, ROWS, sums[p][0]);
    if (at < ops.N) store_sums(ops, row, at, sums[p], true);
  }
}

template <class W, size_t... Row>
constexpr auto few_rows_table(std::index_sequence<Row...>) {
  return std::array{&few_rows<W, (int)Row + 1>...};
}

template <class W>
constexpr auto FEW_ROWS_KERNELS = few_rows_table<W>(std::make_index_sequence<FEW_ROWS>());

// Run body(turn, output, end) over the panels that N outputs take, and over parts of one where threads share
// it, once for each of `turns`. A task is `parts` parts.
template <class Body>
static void for_outputs(long N, long part, long parts, long turns, Body body) {
  const long width = part * parts, all = (N + part - 1) / part * part, num_tasks = (all + width - 1) / width;
  parallel_for_ranges(turns * num_tasks, [&](long first, long last) {
    for (long turn = first / num_tasks; turn * num_tasks < last; turn++) {
      const long start = turn * num_tasks;
      const long end = std::min(std::min(last - start, num_tasks) * width, all);
      for (long output = std::max(first - start, 0L) * width, next; output < end; output = next) {
        next = std::min((output / PANEL + 1) * PANEL, end);
        body(turn, output, next);
      }
    }
  });
}

template <class W>
static void linear_of_few(const W& weights, const Operands& ops) {
  const auto kernel = FEW_ROWS_KERNELS<W>[ops.M - 1];
  const long call = next_call();
  const long part = vectors_at_once((int)ops.M) == PANEL_VECTORS ? PANEL : PANEL / 2;
  const long parts = std::max<long>(1, MIN_WEIGHTS / (part * std::max<long>(1, ops.K)));
  for_outputs(ops.N, part, parts, 1, [&](long, long output, long end) {
    kernel(weights, ops, own_rows(ops, call), 0, output, end);
  });
}

// ---- many rows ----

constexpr int TILE_VECTORS = 2;
constexpr int TILE_ROWS = HAS_SCRATCH ? SUMS / TILE_VECTORS : FEW_ROWS;
constexpr long ROW_BLOCK = 448;  // rows that are copied before they are multiplied: 224 for each end
constexpr long MAX_CHUNK = 256;  // inputs in a scratch; a multiple of 16, and so of every STEP, as all are
constexpr long MANY_TILES = 6;   // of rows: fewer do not pay for a chunk of the full size
constexpr long FETCHERS = 4;     // tiles of rows that fetch the next chunk among them
constexpr long END_ROWS = HAS_SCRATCH ? 20 : 4;  // of a thread, worth reading (and decoding) weights once more

// Inputs [k_start, k_start + count) of a tile of outputs, as floats [input][vector].
template <class W>
static void decode_chunk(const W& weights, long output, long k_start, long count, float* scratch) {
  constexpr int STEP = W::STEP;
  const long k_end = k_start + count;
  for (long k = k_start, end; k < k_end; k = end) {
    end = std::min(weights.run_end(k), k_end);
    typename W::Column columns[TILE_VECTORS];
    for (int v = 0; v < TILE_VECTORS; v++) columns[v] = weights.column(output + v * LANES, k);
    for (; k < end; k += STEP)  // beyond K, whole steps are decoded: there is room
#pragma GCC unroll 16
      for (int v = 0; v < TILE_VECTORS; v++) {
        Vec w[STEP];
        W::decode(columns[v], k, w);
#pragma GCC unroll 16
        for (int s = 0; s < STEP; s++) store(scratch + ((k - k_start + s) * TILE_VECTORS + v) * LANES, w[s]);
      }
  }
}

// A chunk of inputs: rows x [input][row], a tile of weights [input][vector], and what to fetch meanwhile:
// from `next` on, `next_step` bytes with each input.
struct Chunk {
  const float* x;
  const float* weights;
  long count;
  bool is_first, is_last;
  const char* next;
  long next_step;
};

template <int ROWS>
static void multiply_tile(const Operands& ops, const Chunk& chunk, long row, long output) {
  Vec sums[TILE_VECTORS][ROWS] = {};
  if (!chunk.is_first) OutputTile<ROWS, TILE_VECTORS>(ops, row, output).load_sums(sums);
  const float *x = chunk.x, *weights = chunk.weights;
  const char* next = chunk.next;
  const bool fetches = chunk.next_step;
  for (long k = 0; k < chunk.count; k++, x += ROWS, weights += TILE_VECTORS * LANES) {
    if (fetches) {
      __builtin_prefetch(next);
      __builtin_prefetch(next + LINE);
      next += chunk.next_step;
    }
    Vec w[TILE_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; v++) w[v] = load(weights + v * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Vec factor = broadcast(x[r]);
#pragma GCC unroll 4
      for (int v = 0; v < TILE_VECTORS; v++) sums[v][r] += factor * w[v];
    }
  }
  store_sums(ops, row, output, sums, chunk.is_last);
}

template <size_t... Row>
constexpr auto tile_table(std::index_sequence<Row...>) {
  return std::array{&multiply_tile<(int)Row + 1>...};
}

// The tiles [first, last) of a block of copied rows, times the outputs [output, end) of one panel.
template <class W>
static void many_rows(const W& weights, const Operands& ops, const float* copy, long first_row,
                      const RowTiles& tiles, long first, long last, long output, long end) {
  static constexpr auto KERNELS = tile_table(std::make_index_sequence<TILE_ROWS>());
  alignas(64) float scratch[MAX_CHUNK * TILE_VECTORS * LANES];
  const long max_chunk = last - first < MANY_TILES ? MAX_CHUNK / 4 : MAX_CHUNK;
  const long num_chunks = (ops.K + max_chunk - 1) / max_chunk;
  const long even = (ops.K + num_chunks - 1) / num_chunks, chunk_size = (even + 15) / 16 * 16;
  constexpr long BYTES = TILE_VECTORS * LANES * 4 / W::STEP;  // of an input of a tile
  const long fetchers = std::min(last - first, FETCHERS);
  for (long k = 0; k < ops.K; k += chunk_size) {
    const long count = std::min(chunk_size, ops.K - k);
    const uint32_t* words = weights.column(output, k).words + (k + count) / W::STEP * PANEL;
    const char* next = reinterpret_cast<const char*>(words);
    for (long at = output; at < std::min(end, ops.N); at += TILE_VECTORS * LANES) {
      decode_chunk(weights, at, k, count, scratch);
      for (long tile = first; tile < last; tile++) {
        const long start = tiles.start(tile), size = tiles.size(tile);
        const long fetched = tile - first < fetchers ? BYTES / fetchers : 0;
        const Chunk chunk{copy + start * ops.K + k * size, scratch, count, k == 0, k + count == ops.K, next,
                          fetched};
        KERNELS[size - 1](ops, chunk, first_row + start, at);
        next += count * fetched;
      }
    }
  }
}

template <class W>
static void linear_of_many(const W& weights, const Operands& ops) {
  const RowTiles blocks(ops.M, ROW_BLOCK);
  for (long block = 0; block < blocks.count; block++) {
    const long row = blocks.start(block);
    const RowTiles tiles(blocks.size(block), TILE_ROWS);
    float* copy = copy_memory(tiles.num_rows * ops.K);
    parallel_for(tiles.count, [&](long tile) {
      const long start = tiles.start(tile);
      copy_rows(ops, row + start, tiles.size(tile), copy + start * ops.K);
    });
    const auto multiply = [&](long first, long last, long output, long end) {
      if constexpr (HAS_SCRATCH)
        many_rows(weights, ops, copy, row, tiles, first, last, output, end);
      else
        for (long tile = first; tile < last; tile++) {
          const long start = tiles.start(tile);
          FEW_ROWS_KERNELS<W>[tiles.size(tile) - 1](weights, ops, copy + start * ops.K, row + start, output,
                                                    end);
        }
    };
    constexpr long PART = PANEL / 2;  // a whole number of passes for every tile: more than FEW_ROWS rows
    static_assert(vectors_at_once(FEW_ROWS / 2) * LANES <= PART);  // are never cut into less than half of it
    // Each end of the tasks has rows of its own, if they are many enough. More cuts where outputs alone would
    // make too few tasks.
    const long num_parts = (ops.N + PART - 1) / PART, wanted = TASKS_PER_THREAD * nano_num_threads();
    const long ends = tiles.num_rows < std::min(2 * END_ROWS * nano_num_threads(), ROW_BLOCK / 2) ? 1 : 2;
    const long cuts = std::min(std::max((wanted + num_parts - 1) / num_parts, ends), tiles.count);
    for_outputs(ops.N, PART, 1, cuts, [&](long cut, long output, long end) {
      multiply(tiles.count * cut / cuts, tiles.count * (cut + 1) / cuts, output, end);
    });
  }
}

template <class W>
static void linear(const W& weights, const Operands& ops) {
  if (ops.M > FEW_ROWS)
    linear_of_many(weights, ops);
  else if (ops.M > 0)
    linear_of_few(weights, ops);
}

}  // namespace nano_linear
