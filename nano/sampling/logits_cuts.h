// Where a row is truncated: the k-th largest logit, the weight at which top_p is reached.
//
// Nothing is sorted and nothing is scattered. A cut is found by bisection over the bits of a float: count,
// or add up, what is at least as large. Each such pass is a few vector operations per sixteen tokens, and
// after a few of them little is left to look at.
#pragma once

#include "sampling/logits_rows.h"

namespace nano_sampling {

// The k-th largest logit. ids, values: buffers.
static float top_k_cut(const Row& row, const std::vector<float>& column_best, long k,
                       std::vector<int32_t>& ids, std::vector<float>& values) {
  collect_best(row, column_best, k, ids);
  values.assign((ids.size() + LANES - 1) / LANES * LANES, -INF);
  for (size_t i = 0; i < ids.size(); i++) values[i] = *row.at(ids[i]);
  return kth_largest(values.data(), (long)values.size(), k);
}

// Sum of the weights that are at least `cut`.
static NANO_INLINE double mass_from(const float* weights, long num_blocks, float cut) {
  const Vec cuts = broadcast(cut);
  return ordered_sum(num_blocks, [=](long i) {
    const Vec w = load(weights + i);
    return w >= cuts ? w : Vec{};
  });
}

// Copy the weights in [low, high) to `kept`, which may be `weights`: what is written was read before. Returns
// the blocks they fill.
static long keep_between(const float* weights, long num_blocks, float low, float high, float* kept) {
  long num_kept = 0;
  const Vec lows = broadcast(low), highs = broadcast(high);
  for (long i = 0; i < num_blocks * BLOCK; i += LANES) {
    const Vec w = load(weights + i);
    num_kept += store_some(kept + num_kept, w, at_least(w, lows) & ~at_least(w, highs));
  }
  const long kept_blocks = (num_kept + BLOCK - 1) / BLOCK;
  std::fill(kept + num_kept, kept + kept_blocks * BLOCK, 0.0f);
  return kept_blocks;
}

// The smallest weight in the smallest set of largest weights that holds `top_p` of the mass: the largest
// cut from which on the mass still reaches the target. weights: in [0, 1], the largest is 1. spare: as long.
static float top_p_cut(const float* weights, long num_blocks, double top_p, float* spare) {
  constexpr int PASSES = 4;  // between two copies of what is left
  constexpr float LEAST = std::numeric_limits<float>::min();
  const double total = mass_from(weights, num_blocks, float_of(1)), target = top_p * total;
  // All tokens below (1 - top_p) of the average hold too little to matter; half of that is on the safe side.
  const double negligible = 0.5 * (1.0 - top_p) * total / (double)(num_blocks * BLOCK);
  uint32_t low = bits_of(std::max((float)negligible, LEAST)), high = bits_of(1.0f) + 1;
  double above = 0.0;  // mass of the weights that were left behind, all of them over those still here
  while (high - low > 1) {
    num_blocks = keep_between(weights, num_blocks, float_of(low), float_of(high), spare);
    weights = spare;
    double above_high = above;
    for (int pass = 0; pass < PASSES && high - low > 1; pass++) {
      const uint32_t middle = low + (high - low) / 2;
      const double mass = above + mass_from(weights, num_blocks, float_of(middle));
      if (mass >= target) {
        low = middle;
      } else {
        high = middle;
        above_high = mass;
      }
    }
    above = above_high;
  }
  return float_of(low);
}

}  // namespace nano_sampling
