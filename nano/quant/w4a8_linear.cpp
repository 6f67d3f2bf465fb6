// y[M, N] = x[M, K] @ w[N, K]^T + bias with weights in 4 bits and activations in 8.
//
// Every 32 inputs of a row have a scale of their own, so an outlier spoils only its neighbours. Within them
// all is integers; across them each output is one chain of fused multiply-adds, two a group:
//   (sum q_w q_x) * x_scale  times the scale,   (sum q_x) * x_scale  times the offset.
#include "quant/int4_weights.h"
#include "quant/integer_linear.h"

namespace {

using namespace nano_integer;

constexpr long GROUP = 32;  // inputs of a row that share a scale; divides the weights' groups
constexpr long WORD = 8;    // inputs in a word

template <class Scale>
struct Tile {
  // As many sums as there are registers, less what the weights and a row's inputs need.
  static constexpr int MAX_ROWS = LANES == 16 ? 6 : 4;
  static constexpr int vectors_at_once(int rows) { return LANES == 16 || rows <= 2 ? 4 : 2; }

  Int4Weights<Scale> weights;
  const float* x_offsets;  // [M][groups of x]: scale times sum
  Operands ops;

  template <int ROWS, int VECTORS>
  void run(const QuantizedRows& x, long row, long output) const {
    Vec totals[VECTORS][ROWS] = {};
    const long num_whole = ops.K / GROUP;
    for (long group = 0; group < num_whole; group++)
      add_group(x, row, group, output, GROUP / WORD, totals);
    if (num_whole < x.num_groups)
      add_group(x, row, num_whole, output, weights.num_words - num_whole * GROUP / WORD, totals);
    store_sums(ops, row, output, totals, true);
  }

  template <int ROWS, int VECTORS>
  NANO_INLINE void add_group(const QuantizedRows& x, long row, long group, long output, long num_words,
                             Vec (&totals)[VECTORS][ROWS]) const {
    const uint32_t* words[VECTORS];
    for (int v = 0; v < VECTORS; v++)
      words[v] = weights.words + first_word(output + v * LANES, weights.num_words) + group * GROUP / WORD * PANEL;
    const int8_t* inputs = x.q.get() + row * x.num_words * 4 + group * GROUP * ROWS;
    IntVec sums[VECTORS][ROWS] = {};
#pragma GCC unroll 4
    for (long word = 0; word < num_words; word++, inputs += WORD * ROWS) {
      WordVec both[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++)
        both[v] = load(words[v] + word * PANEL);
      add_four(both, inputs, sums);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) both[v] >>= 4;
      add_four(both, inputs + 4 * ROWS, sums);
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

  // Four inputs of each row, times the low half of every byte.
  template <int ROWS, int VECTORS>
  static NANO_INLINE void add_four(const WordVec (&words)[VECTORS], const int8_t* inputs,
                                   IntVec (&sums)[VECTORS][ROWS]) {
    WordVec w[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) w[v] = words[v] & 0x0f0f0f0fu;
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const IntVec four = broadcast_word(inputs + 4 * r);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sums[v][r] = dot_unsigned(sums[v][r], w[v], four);
    }
  }
};

template <class Scale>
void multiply(const Int4Weights<Scale>& weights, const Operands& ops) {
  const QuantizedRows x = quantize_rows(ops.x, ops.K, GROUP, RowTiles(ops.M, Tile<Scale>::MAX_ROWS));
  const auto offsets = std::make_unique_for_overwrite<float[]>(ops.M * x.num_groups);
  for (long i = 0; i < ops.M * x.num_groups; i++) offsets[i] = x.scale[i] * (float)x.sum[i];
  integer_linear(Tile<Scale>{weights, offsets.get(), ops}, x, ops, ops.K / 2 + 1);
}

// The weights are packed as for linear_int4, in groups of a multiple of 32 inputs or the whole row.
Tensor linear_w4a8(const Tensor& x, const Tensor& packed, const Tensor& scales,
                   const std::optional<Tensor>& bias, int64_t group_size, int64_t num_outputs) {
  Tensor y = empty_floats({x.size(0), num_outputs});
  if (x.size(0) == 0) return y;
  const Tensor rows = x.is_contiguous() ? x : torch::stable::contiguous(x);
  if (scales.element_size() == 2)
    multiply(int4_weights<Float16>(packed, scales, group_size), operands(rows, bias, y));
  else
    multiply(int4_weights<float>(packed, scales, group_size), operands(rows, bias, y));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(nano, m) {
  m.def(
      "linear_w4a8(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int group_size,"
      " int num_outputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(nano, CPU, m) { m.impl("linear_w4a8", TORCH_BOX(&linear_w4a8)); }
