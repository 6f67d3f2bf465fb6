// What every linear kernel has to do with its operands: read rows of x, write tiles of y.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "native/vector.h"

namespace nano_linear {

constexpr long PANEL = 64;  // outputs stored side by side
constexpr int PANEL_VECTORS = PANEL / LANES;
constexpr long LINE = 64;  // bytes of the cache line that a prefetch fetches
constexpr long TASKS_PER_THREAD = 4;  // with fewer, the last one is waited for

// The operands of one call; strides count floats.
struct Operands {
  const float* x;
  long x_stride;
  const float* bias;  // or null
  float* y;           // [M, N], contiguous
  long M, N, K;

  float* at(long row, long output) const { return y + row * N + output; }
};

// Rows cut into tiles of at most `most`, evenly: 13 are 7 + 6, never 12 and one.
struct RowTiles {
  long num_rows, count;

  RowTiles(long rows, long most) : num_rows(rows), count((rows + most - 1) / most) {}
  long start(long tile) const { return num_rows * tile / count; }
  long size(long tile) const { return start(tile + 1) - start(tile); }
};

// Few tiles need these two: apart, and one for tiles of every size, they take no time to compile.
static __attribute__((noinline)) void copy_columns(const float* from, long from_stride, float* to,
                                                   long to_stride, long rows, long columns) {
  for (long r = 0; r < rows; r++) std::copy_n(from + r * from_stride, columns, to + r * to_stride);
}

static __attribute__((noinline)) void add_to_rows(const float* addend, float* to, long stride, long rows,
                                                  long columns) {
  for (long r = 0; r < rows; r++)
    for (long i = 0; i < columns; i++) to[r * stride + i] += addend[i];
}

// The tile of y at (row, output): its memory, or where it reaches beyond N, a copy of `rows` rows.
template <int ROWS, int VECTORS>
struct OutputTile {
  static constexpr long WIDTH = VECTORS * LANES;

  const Operands& ops;
  long row, output, num_valid;  // outputs of the tile that exist
  alignas(64) float copy[ROWS * WIDTH];

  NANO_INLINE OutputTile(const Operands& operands, long first_row, long first_output)
      : ops(operands), row(first_row), output(first_output),
        num_valid(std::min(WIDTH, operands.N - first_output)) {}

  NANO_INLINE void load_sums(Vec (&sums)[VECTORS][ROWS]) {
    const float* from = ops.at(row, output);
    long stride = ops.N;
    if (num_valid < WIDTH) {
      copy_columns(from, stride, copy, WIDTH, ROWS, num_valid);
      from = copy, stride = WIDTH;
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++, from += stride)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) sums[v][r] = load(from + v * LANES);
  }

  // Complete sums get their bias.
  NANO_INLINE void store_sums(const Vec (&sums)[VECTORS][ROWS], bool are_complete) {
    float* const y = ops.at(row, output);
    const bool is_whole = num_valid == WIDTH;
    float* to = is_whole ? y : copy;
    const long stride = is_whole ? ops.N : WIDTH;
    float* at = to;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++, at += stride)
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; v++) store(at + v * LANES, sums[v][r]);
    if (ops.bias && are_complete) add_to_rows(ops.bias + output, to, stride, ROWS, num_valid);
    if (!is_whole) copy_columns(copy, WIDTH, y, ops.N, ROWS, num_valid);
  }

};

// y = `sums`, plus the bias if there are no more to come.
template <int ROWS, int VECTORS>
NANO_INLINE void store_sums(const Operands& ops, long row, long output, const Vec (&sums)[VECTORS][ROWS],
                            bool are_complete) {
  OutputTile<ROWS, VECTORS>(ops, row, output).store_sums(sums, are_complete);
}

// Copy `rows` rows as [input][row]: a tile of rows then reads one stream.
static inline void copy_rows(const Operands& ops, long first_row, long rows, float* to) {
  typedef float Quad __attribute__((vector_size(16), aligned(4)));
  const auto load_quad = [](const float* p) { return *reinterpret_cast<const Quad*>(p); };
  const auto store_quad = [](float* p, Quad q) { *reinterpret_cast<Quad*>(p) = q; };
  const long stride = ops.x_stride;
  long r = 0;
  for (; r + 4 <= rows; r += 4) {  // four by four
    const float* from = ops.x + (first_row + r) * stride;
    long k = 0;
    for (; k + 4 <= ops.K; k += 4) {
      const Quad a = load_quad(from + k), b = load_quad(from + stride + k);
      const Quad c = load_quad(from + 2 * stride + k), d = load_quad(from + 3 * stride + k);
      const Quad low_ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      const Quad low_cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Quad high_ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const Quad high_cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      float* at = to + k * rows + r;
      store_quad(at, __builtin_shufflevector(low_ab, low_cd, 0, 1, 4, 5));
      store_quad(at + rows, __builtin_shufflevector(low_ab, low_cd, 2, 3, 6, 7));
      store_quad(at + 2 * rows, __builtin_shufflevector(high_ab, high_cd, 0, 1, 4, 5));
      store_quad(at + 3 * rows, __builtin_shufflevector(high_ab, high_cd, 2, 3, 6, 7));
    }
    for (; k < ops.K; k++)
      for (long i = 0; i < 4; i++) to[k * rows + r + i] = from[i * stride + k];
  }
  for (; r < rows; r++)
    for (long k = 0; k < ops.K; k++) to[k * rows + r] = ops.x[(first_row + r) * stride + k];
}

// Memory of the calling thread, kept: fresh pages cost more than what is copied there.
static inline float* copy_memory(long floats) {
  static thread_local std::vector<float> memory;
  if ((long)memory.size() < floats) memory.resize(floats);
  return memory.data();
}

// All rows of `call` as [input][row], copied by each thread for itself when it first asks. Written once for
// all of them, every line would cross from one core's cache to the others', and back for the next call.
static inline const float* own_rows(const Operands& ops, long call) {
  static thread_local long copied = 0;  // the call whose rows this thread has
  if (ops.M == 1) return ops.x;
  float* const copy = copy_memory(ops.M * ops.K);
  if (copied != call) copy_rows(ops, 0, ops.M, copy);
  copied = call;
  return copy;
}

static inline long next_call() {
  static std::atomic<long> num_calls{0};
  return ++num_calls;
}

}  // namespace nano_linear
