// y[M, N] = x[M, K] @ w[N, K]^T + bias with weights in 4 bits and activations in 8.
//
// Every 32 inputs of a row have a scale of their own, so an outlier spoils only its neighbours. Within them
// all is integers; across them each output is one chain of fused multiply-adds, two a group:
//   (sum q_w q_x) * x_scale  times the scale,   (sum q_x) * x_scale  times the offset.
#include "layers/tiled_linear.h"
#include "quant/int4_weights.h"
#include "quant/quantized_rows.h"

namespace {

using namespace nano_tiled;

constexpr long GROUP = 32;  // inputs of a row that share a scale; divides the weights' groups
constexpr long WORD = 8;    // inputs in a word

// Vectors of a panel whose sums, with those of its other rows, fit the registers.
constexpr int vectors_at_once(int rows) {
  if (LANES == 16) return 4;
  return !HAS_DOTS ? 1 : rows <= 2 ? 4 : 2;
}

struct Tile {
  using Rows = QuantizedRows;
  static constexpr int MAX_ROWS = LANES == 16 ? 6 : HAS_DOTS ? 4 : 1;

  Int4Weights weights;
  const float* x_offsets;  // as the scales of x: scale times sum
  Operands ops;

  template <int ROWS>
  void run(const QuantizedRows& x, long row, long output) const {
    constexpr int VECTORS = vectors_at_once(ROWS), PASSES = PANEL_VECTORS / VECTORS;
    Vec totals[PASSES][VECTORS][ROWS] = {};
    for (long group = 0; group < x.num_groups; group++)
      for (int p = 0; p < PASSES; p++) add_group(x, row, group, output + p * VECTORS * LANES, totals[p]);
    for (int p = 0; p < PASSES; p++)
      if (const long at = output + p * VECTORS * LANES; at < ops.N) store_sums(ops, row, at, totals[p], true);
  }

  template <int ROWS, int VECTORS>
  NANO_INLINE void add_group(const QuantizedRows& x, long row, long group, long output,
                             Vec (&totals)[VECTORS][ROWS]) const {
    const long first = group * GROUP / WORD, count = std::min(GROUP / WORD, weights.num_words - first);
    const uint32_t* words = weights.column(output, 0).words + first * PANEL;
    const int8_t* inputs = x.q.get() + row * x.num_words * 4 + group * GROUP * ROWS;
    IntVec sums[VECTORS][ROWS] = {};
    if (count == GROUP / WORD) {
#pragma GCC unroll 4
      for (long word = 0; word < GROUP / WORD; word++)
        add_word(words + word * PANEL, inputs + word * WORD * ROWS, sums);
    } else {
      for (long word = 0; word < count; word++)
        add_word(words + word * PANEL, inputs + word * WORD * ROWS, sums);
    }
    const long at = row * x.num_groups + group * ROWS;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const auto column = weights.column(output + v * LANES, group * GROUP);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        Vec total = totals[v][r];
        total += __builtin_convertvector(sums[v][r], Vec) * broadcast(x.scale[at + r]) * column.scale;
        total += broadcast(x_offsets[at + r]) * column.offset;
        totals[v][r] = total;
      }
    }
  }

  // Eight inputs of each row.
  template <int ROWS, int VECTORS>
  static NANO_INLINE void add_word(const uint32_t* words, const int8_t* inputs,
                                   IntVec (&sums)[VECTORS][ROWS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
      const WordVec both = load(words + v * LANES);
      const WordVec low = both & 0x0f0f0f0fu, high = both >> 4 & 0x0f0f0f0fu;
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        sums[v][r] = dot_unsigned(sums[v][r], low, broadcast_word(inputs + 4 * r));
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++)
        sums[v][r] = dot_unsigned(sums[v][r], high, broadcast_word(inputs + 4 * (ROWS + r)));
    }
  }
};

// The weights are packed as for linear_int4, in groups of a multiple of 32 inputs or the whole row.
Tensor linear_w4a8(const Tensor& x, const Tensor& packed, const Tensor& scales,
                   const std::optional<Tensor>& bias, int64_t group_size, int64_t num_outputs) {
  Tensor y = empty<float>({x.size(0), num_outputs});
  if (x.size(0) == 0) return y;
  const Tensor dense = contiguous(x);
  const Operands ops = operands(dense, bias, y);
  const QuantizedRows rows = quantize_rows(ops.x, ops.K, GROUP, RowTiles(ops.M, Tile::MAX_ROWS));
  const auto offsets = std::unique_ptr<float[]>(new float[ops.M * rows.num_groups]);
  for (long i = 0; i < ops.M * rows.num_groups; i++) offsets[i] = rows.scale[i] * (float)rows.sum[i];
  tiled_linear(Tile{Int4Weights(packed, scales, group_size), offsets.get(), ops}, rows, ops,
                 (ops.K / 2 + 1) * PANEL);
  return y;
}

}  // namespace

static const Ops ops{
    {"linear_w4a8(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int group_size, "
     "int num_outputs) -> Tensor",
     op<&linear_w4a8>},
};
