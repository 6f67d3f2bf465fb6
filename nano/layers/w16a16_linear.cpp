// nano::linear_w16a16: a linear layer of bfloat16 weights whose inputs are rounded to bfloat16. Products are
// exact, and their sum is one chain of float32 over pairs of inputs.
//
// A CPU that multiplies pairs of bfloat16 takes half the instructions of float32. Elsewhere the rounded
// inputs take the way of float32.
#include <memory>
#include <vector>

#include "layers/bfloat16_weights.h"
#include "layers/tiled_linear.h"
#include "native/pairs.h"

namespace {

#if defined(NANO_PAIRS)

using namespace nano_tiled;

constexpr long STRETCH = 64;     // words of a panel that two passes share: 16 KB
constexpr long NEAR_WORDS = 16;  // steps along a panel that are fetched ahead

// Rows rounded, a pair of neighbouring inputs in a word; zero beyond an odd number of inputs.
struct PairedRows {
  RowTiles tiles;
  long num_words;  // per row
  std::unique_ptr<uint32_t[]> words;  // of each tile of R rows [num_words][R]
};

PairedRows pair_rows(const float* x, long K, RowTiles tiles) {
  const long num_words = (K + 1) / 2;
  PairedRows rows{tiles, num_words, std::unique_ptr<uint32_t[]>(new uint32_t[tiles.num_rows * num_words])};
  if (tiles.num_rows == 1) {
    round_to_pairs(x, K, rows.words.get());
    return rows;
  }
  const long tiles_per_task = 32768 / (K * tiles.size(0)) + 1;  // fewer are not worth a thread's attention
  parallel_for_ranges((tiles.count + tiles_per_task - 1) / tiles_per_task, [&](long first, long last) {
    std::vector<uint32_t> row(num_words);
    for (long tile = first * tiles_per_task; tile < std::min(tiles.count, last * tiles_per_task); tile++) {
      const long start = tiles.start(tile), R = tiles.size(tile);
      for (long r = 0; r < R; r++) {
        round_to_pairs(x + (start + r) * K, K, row.data());
        uint32_t* to = rows.words.get() + start * num_words + r;
        for (long word = 0; word < num_words; word++) to[word * R] = row[word];
      }
    }
  });
  return rows;
}

struct Tile {
  using Rows = PairedRows;
  static constexpr int MAX_ROWS = 8;
  static constexpr int WIDE_ROWS = 6;  // most that take whole panels: 24 sums, four weights and a factor

  const uint32_t* packed;  // [N / 64][num_words][64]
  Operands ops;

  // Seven and eight rows are read for once; more are bound by the multipliers, and fill them by sixes.
  static RowTiles tiles_of(long rows) { return {rows, rows <= MAX_ROWS ? MAX_ROWS : WIDE_ROWS}; }

  template <int ROWS>
  void run(const Rows& x, long row, long output) const {
    constexpr int VECTORS = ROWS <= WIDE_ROWS ? 4 : 2, PASSES = PANEL_VECTORS / VECTORS;
    // Two passes share a stretch; each fetches half of the next one into the second-level cache.
    const long stretch = PASSES == 1 ? x.num_words : STRETCH;
    const uint32_t* panel = packed + output * x.num_words;
    const uint32_t* inputs = x.words.get() + row * x.num_words;
    Vec sums[PASSES][VECTORS][ROWS] = {};
    for (long word = 0; word < x.num_words; word += stretch)
      for (int p = 0; p < PASSES; p++)
        add(panel + word * PANEL + p * VECTORS * LANES, inputs + word * ROWS,
            panel + (word + STRETCH) * PANEL + p * STRETCH * VECTORS * LANES,
            std::min(stretch, x.num_words - word), sums[p]);
    for (int p = 0; p < PASSES; p++)
      if (const long at = output + p * VECTORS * LANES; at < ops.N) store_sums(ops, row, at, sums[p], true);
  }

  template <int ROWS, int VECTORS>
  static NANO_INLINE void add(const uint32_t* words, const uint32_t* inputs, const uint32_t* far, long count,
                              Vec (&carried)[VECTORS][ROWS]) {
    // Rows so few are the only tile (where there are several, each has more than half of WIDE_ROWS): as in
    // linear_kernel.h, weights that nobody reads again are kept out of the other caches.
    constexpr int LOCALITY = ROWS <= WIDE_ROWS / 2 ? 0 : 3;
    Vec sums[VECTORS][ROWS];  // a copy, which is kept in registers
    std::memcpy(sums, carried, sizeof sums);
    for (long word = 0; word < count; word++, words += PANEL, inputs += ROWS, far += VECTORS * LANES) {
      WordVec w[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) {
        __builtin_prefetch(words + NEAR_WORDS * PANEL + v * LANES, 0, LOCALITY);
        if (VECTORS < PANEL_VECTORS) __builtin_prefetch(far + v * LANES, 0, 2);
        w[v] = load(words + v * LANES);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const WordVec pair = inputs[r] - WordVec{};
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[v][r] = add_pair_products(sums[v][r], w[v], pair);
      }
    }
    std::memcpy(carried, sums, sizeof sums);
  }
};

Tensor linear_w16a16(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                     int64_t num_outputs) {
  Tensor y = empty<float>({x.size(0), num_outputs});
  if (x.size(0) == 0) return y;
  const Tensor rows = contiguous(x);
  const Operands ops = operands(rows, bias, y);
  tiled_linear(Tile{static_cast<const uint32_t*>(packed.const_data_ptr()), ops},
               pair_rows(ops.x, ops.K, Tile::tiles_of(ops.M)), ops, ops.K * 2 * PANEL);
  return y;
}

#else

Tensor linear_w16a16(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                     int64_t num_outputs) {
  const Tensor dense = contiguous(x);
  const long count = x.size(0) * x.size(1);
  Tensor rounded = empty<float>({x.size(0), x.size(1)});
  const float* from = dense.const_data_ptr<float>();
  float* to = rounded.mutable_data_ptr<float>();
  for (long i = 0; i < count; i++) {
    const uint32_t word = (uint32_t)nearest_bfloat16(from[i]) << 16;
    std::memcpy(to + i, &word, sizeof word);
  }
  return linear_op(nano_linear::BFloat16(packed, x.size(1)), rounded, bias, num_outputs);
}

#endif

}  // namespace

static const Ops ops{
    {"linear_w16a16(Tensor x, Tensor packed, Tensor? bias, int num_outputs) -> Tensor", op<&linear_w16a16>},
};
