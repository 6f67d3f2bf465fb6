// y[M, N] = x[M, K] @ w[N, K]^T + bias with weights and activations in 8 bits: products and their sums
// are integers, and the roundings that follow come in one order.
//
// Weights lie as in int8_weights.h: one load brings four inputs of LANES outputs, which one instruction
// multiplies by the same four of a row.
#include "layers/tiled_linear.h"
#include "quant/quantized_rows.h"

namespace {

using namespace nano_tiled;

// Vectors of a panel whose sums, with those of its other rows, fit the registers.
constexpr int vectors_at_once(int rows) {
  if (LANES == 16) return 4;
  return !HAS_DOTS ? 1 : rows == 1 ? 8 : rows == 2 ? 4 : 2;
}

constexpr long LINE_WORDS = 16;  // of a cache line

// Multiplication that is not to be fused with the addition after it, which not every CPU could do.
static NANO_INLINE Vec unfused(Vec product) {
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(product);
#else
  asm volatile("" : "+m"(product));
  return product;
#endif
}

struct Tile {
  using Rows = QuantizedRows;
  static constexpr int MAX_ROWS = LANES == 16 ? 7 : HAS_DOTS ? 4 : 1;

  const uint32_t* words;  // [N / 64][num_words][64]
  const float* scales;    // [N / 64 * 64]
  long num_words;         // of one output
  Operands ops;

  template <int ROWS>
  void run(const QuantizedRows& x, long row, long output) const {
    constexpr int VECTORS = vectors_at_once(ROWS), PASSES = PANEL_VECTORS / VECTORS;
    // Several passes share a stretch that stays in the first-level cache, and fetch the next one.
    const long stretch = PASSES == 1 ? num_words : 32;
    const uint32_t* panel = words + output * num_words;
    const int8_t* inputs = x.q.get() + row * x.num_words * 4;
    IntVec sums[PASSES][VECTORS][ROWS] = {};
    for (long word = 0; word < num_words; word += stretch)
      for (int p = 0; p < PASSES; p++)
        add<PASSES>(panel + word * PANEL + p * VECTORS * LANES, inputs + word * ROWS * 4,
                    panel + (word + stretch) * PANEL + p * stretch * VECTORS * LANES,
                    std::min(stretch, num_words - word), sums[p]);
    for (int p = 0; p < PASSES; p++)
      if (const long at = output + p * VECTORS * LANES; at < ops.N) finish(x, row, at, sums[p]);
  }

  template <int PASSES, int ROWS, int VECTORS>
  static NANO_INLINE void add(const uint32_t* words, const int8_t* inputs, const uint32_t* next, long count,
                              IntVec (&carried)[VECTORS][ROWS]) {
    IntVec sums[VECTORS][ROWS];  // a copy, which is kept in registers
    std::memcpy(sums, carried, sizeof sums);
    for (long word = 0; word < count; word++, words += PANEL, inputs += ROWS * 4, next += VECTORS * LANES)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        if (PASSES > 1 && v * LANES % LINE_WORDS == 0) __builtin_prefetch(next + v * LANES);
        const WordVec w = dot_operand(load(words + v * LANES));
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[v][r] = dot_signed(sums[v][r], w, broadcast_word(inputs + r * 4));
      }
    std::memcpy(carried, sums, sizeof sums);
  }

  template <int ROWS, int VECTORS>
  NANO_INLINE void finish(const QuantizedRows& x, long row, long output,
                          const IntVec (&sums)[VECTORS][ROWS]) const {
    Vec results[VECTORS][ROWS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const Vec exact = __builtin_convertvector(sums[v][r] - DOT_OFFSET * x.sum[row + r], Vec);
        results[v][r] = unfused(exact * broadcast(x.scale[row + r]) * load(scales + output + v * LANES));
      }
    store_sums(ops, row, output, results, true);
  }
};

// x [M, K] float32; packed [N / 64][K / 4][64][4] int8; scales [N / 64][1][64] float32; bias [N].
Tensor linear_w8a8(const Tensor& x, const Tensor& packed, const Tensor& scales,
                   const std::optional<Tensor>& bias, int64_t num_outputs) {
  const long K = x.size(1);
  Tensor y = empty<float>({x.size(0), num_outputs});
  if (x.size(0) == 0) return y;
  const Tensor rows = contiguous(x);
  const Operands ops = operands(rows, bias, y);
  const Tile tile{static_cast<const uint32_t*>(packed.const_data_ptr()), scales.const_data_ptr<float>(),
                  packed.size(1), ops};
  tiled_linear(tile, quantize_rows(ops.x, K, K, RowTiles(ops.M, Tile::MAX_ROWS)), ops, K * PANEL);
  return y;
}

}  // namespace

static const Ops ops{
    {"linear_w8a8(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int num_outputs) -> Tensor",
     op<&linear_w8a8>},
};
