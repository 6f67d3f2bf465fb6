// integer_linear<Tile>: deals the rows and outputs of a linear layer with 8-bit activations to tiles that
// fill the registers, and those to threads. Integer sums are exact, so how they are cut shows nowhere.
//
// A class Tile has
//   static constexpr int MAX_ROWS;                      most rows of a tile
//   static constexpr int vectors_at_once(int rows);     vectors of outputs beside them
//   template <int ROWS, int VECTORS> void run(const QuantizedRows& x, long row, long output) const;
//                                                       the tile of rows that begins with `row`
#pragma once

#include <array>
#include <utility>

#include "layers/linear_kernel.h"
#include "native/tensor.h"
#include "quant/quantized_rows.h"

namespace nano_integer {

using nano_linear::Operands;
using nano_linear::PANEL;
using nano_linear::PANEL_VECTORS;
using nano_linear::store_sums;
using nano_linear::TASKS_PER_THREAD;

constexpr long TASK_BYTES = 1 << 17;  // of weights: the second-level cache keeps them for all rows of a task
constexpr long TASK_ROWS = 128;

// Where the outputs [output, output + LANES) begin in panels of `panel_words` words for each of 64 outputs.
static NANO_INLINE long first_word(long output, long panel_words) {
  return output / PANEL * panel_words * PANEL + output % PANEL;
}

// Multiplication that is not to be fused with the addition after it, which not every CPU could do.
static NANO_INLINE Vec unfused(Vec product) {
#if defined(__has_builtin) && __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(product);
#else
  asm volatile("" : "+m"(product));
  return product;
#endif
}

// x and y contiguous.
static inline Operands operands(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& y) {
  return {x.const_data_ptr<float>(), x.size(1),
          bias ? bias->const_data_ptr<float>() : nullptr,
          y.mutable_data_ptr<float>(), x.size(0), y.size(1), x.size(1)};
}

// ROWS rows over the outputs [output, end).
template <class Tile, int ROWS>
static void rows_over_outputs(const Tile& tile, const QuantizedRows& x, long row, long output, long end) {
  constexpr int VECTORS = Tile::vectors_at_once(ROWS);
  for (; output + VECTORS * LANES <= end; output += VECTORS * LANES)
    tile.template run<ROWS, VECTORS>(x, row, output);
  for (; output < end; output += LANES) tile.template run<ROWS, 1>(x, row, output);
}

template <class Tile, size_t... Row>
constexpr auto kernels_by_rows(std::index_sequence<Row...>) {
  return std::array{&rows_over_outputs<Tile, (int)Row + 1>...};
}

// An output has `output_bytes` of weights.
template <class Tile>
static void integer_linear(const Tile& tile, const QuantizedRows& x, const Operands& ops,
                           long output_bytes) {
  static constexpr auto KERNELS = kernels_by_rows<Tile>(std::make_index_sequence<Tile::MAX_ROWS>());
  const RowTiles& tiles = x.tiles;
  const long tiles_per_task = std::min(tiles.count, TASK_ROWS / Tile::MAX_ROWS);
  const long num_blocks = (tiles.count + tiles_per_task - 1) / tiles_per_task;

  const long num_stored = (ops.N + PANEL - 1) / PANEL * PANEL;
  const long pass = Tile::vectors_at_once((int)tiles.size(0)) * LANES;
  const long fair = num_stored / (TASKS_PER_THREAD * nano_num_threads());
  const long outputs_per_task = std::max(1L, std::min(fair, TASK_BYTES / output_bytes) / pass) * pass;
  const long num_groups = (num_stored + outputs_per_task - 1) / outputs_per_task;
  // Tasks that follow one another share their weights.
  parallel_for(num_groups * num_blocks, [&](long task) {
    const long output = task / num_blocks * outputs_per_task, from = task % num_blocks * tiles_per_task;
    const long end = std::min(output + outputs_per_task, num_stored);
    for (long index = from; index < std::min(from + tiles_per_task, tiles.count); index++)
      KERNELS[tiles.size(index) - 1](tile, x, tiles.start(index), output, end);
  });
}

}  // namespace nano_integer
