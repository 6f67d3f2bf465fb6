// y[M, N] = x[M, K] @ w[N, K]^T + bias with weights and activations in 8 bits: products and their sums
// are integers, and the roundings that follow come in one order.
//
// Weights lie as in int8_weights.h: one load brings four inputs of LANES outputs, which one instruction
// multiplies by the same four of a row.
#include "quant/integer_linear.h"

namespace {

using namespace nano_integer;

struct Tile {
  // As many sums as there are registers, less what the weights and a row's inputs need.
  static constexpr int MAX_ROWS = LANES == 16 ? 6 : 4;
  static constexpr int vectors_at_once(int rows) {
    return LANES == 16 ? 4 : rows == 1 ? 8 : rows == 2 ? 4 : 2;
  }

  const uint32_t* words;  // [N / 64][num_words][64]
  const float* scales;    // [N / 16 * 16]
  long num_words;         // of one output
  Operands ops;

  template <int ROWS, int VECTORS>
  void run(const QuantizedRows& x, long row, long output) const {
    IntVec sums[VECTORS][ROWS] = {};
    const int8_t* inputs = x.q.get() + row * x.num_words * 4;
    const uint32_t* from[VECTORS];
    for (int v = 0; v < VECTORS; v++) from[v] = words + first_word(output + v * LANES, num_words);
    for (long word = 0; word < num_words; word++, inputs += ROWS * 4) {
      WordVec w[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        std::memcpy(&w[v], from[v] + word * PANEL, sizeof w[v]);
        w[v] = dot_operand(w[v]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const IntVec four = broadcast_word(inputs + r * 4);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[v][r] = dot_signed(sums[v][r], w[v], four);
      }
    }
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
  Tensor y = empty_floats({x.size(0), num_outputs});
  if (x.size(0) == 0) return y;
  const Tensor rows = x.is_contiguous() ? x : torch::stable::contiguous(x);
  const Operands ops = operands(rows, bias, y);
  const Tile tile{static_cast<const uint32_t*>(packed.const_data_ptr()), scales.const_data_ptr<float>(),
                  packed.size(1), ops};
  integer_linear(tile, quantize_rows(ops.x, K, K, RowTiles(ops.M, Tile::MAX_ROWS)), ops, K);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(nano, m) {
  m.def("linear_w8a8(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int num_outputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(nano, CPU, m) { m.impl("linear_w8a8", TORCH_BOX(&linear_w8a8)); }
