// tiled_linear<Tile>: deals the rows and outputs of a linear layer whose activations were made narrower to
// tiles that fill the registers, and those to threads. A tile sums over all inputs: cuts show nowhere.
//
// A class Tile has
//   static constexpr int MAX_ROWS;   most rows of a tile
//   using Rows = ...;                the activations, cut into `tiles` of rows
//   template <int ROWS> void run(const Rows& x, long row, long output) const;
//                                    the tile of rows from `row` on, the panel from `output` on
#pragma once

#include <array>
#include <utility>

#include "layers/linear_operands.h"
#include "native/op.h"
#include "native/threads.h"

namespace nano_tiled {

using nano_linear::Operands;
using nano_linear::PANEL;
using nano_linear::PANEL_VECTORS;
using nano_linear::RowTiles;
using nano_linear::store_sums;
using nano_linear::TASKS_PER_THREAD;

constexpr long TASK_BYTES = 1 << 17;  // of weights: the second-level cache keeps them for all rows of a task
constexpr long TASK_ROWS = 128;
constexpr long MIN_END_ROWS = 128;  // fewer are not worth reading the weights for

// x and y contiguous.
static inline Operands operands(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& y) {
  return {x.const_data_ptr<float>(), x.size(1),
          bias ? bias->const_data_ptr<float>() : nullptr,
          y.mutable_data_ptr<float>(), x.size(0), y.size(1), x.size(1)};
}

template <class Tile, int ROWS>
static void run(const Tile& tile, const typename Tile::Rows& x, long row, long output) {
  tile.template run<ROWS>(x, row, output);
}

template <class Tile, size_t... Row>
constexpr auto kernels_by_rows(std::index_sequence<Row...>) {
  return std::array{&run<Tile, (int)Row + 1>...};
}

// A panel has `panel_bytes` of weights.
template <class Tile>
static void tiled_linear(const Tile& tile, const typename Tile::Rows& x, const Operands& ops,
                         long panel_bytes) {
  static constexpr auto KERNELS = kernels_by_rows<Tile>(std::make_index_sequence<Tile::MAX_ROWS>());
  const RowTiles& tiles = x.tiles;
  const long num_panels = (ops.N + PANEL - 1) / PANEL, wanted = TASKS_PER_THREAD * nano_num_threads();
  const long panels_per_task = std::max(1L, std::min(num_panels / wanted, TASK_BYTES / panel_bytes));
  const long num_groups = (num_panels + panels_per_task - 1) / panels_per_task;
  const long fair = std::max(1L, tiles.count * num_groups / (2 * wanted));
  const long tiles_per_task = std::min(fair, TASK_ROWS / Tile::MAX_ROWS);
  const long num_blocks = (tiles.count + tiles_per_task - 1) / tiles_per_task;
  // Tasks that follow one another share their weights; each end of them has rows of its own.
  const RowTiles ends(num_blocks, ops.M < 2 * MIN_END_ROWS ? num_blocks : (num_blocks + 1) / 2);
  parallel_for(num_groups * num_blocks, [&](long task) {
    const long end = task < num_groups * ends.size(0) ? 0 : 1, first_block = ends.start(end);
    const long within = task - num_groups * first_block, size = ends.size(end);
    const long first = within / size * panels_per_task;
    const long from = (first_block + within % size) * tiles_per_task;
    for (long tile_index = from; tile_index < std::min(from + tiles_per_task, tiles.count); tile_index++)
      for (long panel = first; panel < std::min(first + panels_per_task, num_panels); panel++)
        KERNELS[tiles.size(tile_index) - 1](tile, x, tiles.start(tile_index), panel * PANEL);
  });
}

}  // namespace nano_tiled
