// A cache of bfloat16 against which queries and weights are rounded as well, two products at a time: a key's
// dimensions and a value's positions lie in pairs. Sums are of float32, each one chain of pairs.
#pragma once

#include "attention_rows.h"

struct Paired {
  uint16_t bits;
};

template <>
struct Format<Paired> {
  using Copy = Paired;

  // Keys: [dim / 2][width][2]; values: [PANEL / 2][dim][2], where a block is of whole panels.
  static long of_key(long position, long d, long width, long dim) {
    return position / width * width * dim + d / 2 * 2 * width + position % width * 2 + d % 2;
  }
  static long of_value(long position, long d, long width, long dim) {
    return width == PANEL ? position / 2 * 2 * dim + d * 2 + position % 2 : position * dim + d;
  }

  static constexpr long UNIT = 2;
  using Factor = Pair;
  using Element = Pair;
  template <class V>
  using Operand = typename Integers<sizeof(V) / sizeof(float)>::Words;

  template <class V>
  static NANO_INLINE Operand<V> load(const Pair* p) {
    Operand<V> pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return pairs;
  }
  template <class V>
  static NANO_INLINE V add(V sum, Operand<V> operand, Operand<V> factor) {
    return add_pair_products(sum, operand, factor);
  }

  static void store_query(const float* q, float scale, long dim, float* to) {
    float scaled[PANEL];
    for (long d = 0; d < dim; d += PANEL) {
      const long count = std::min(PANEL, dim - d);
      for (long i = 0; i < count; i++) scaled[i] = q[d + i] * scale;
      round_to_pairs(scaled, count, reinterpret_cast<Pair*>(to) + d / 2);
    }
  }
  static void store_weights(float* weights) {
    round_to_pairs(weights, RANGE, reinterpret_cast<Pair*>(weights));
  }

  // The values of a position that is not seen are left out, of the pair that it shares with the last one.
  static void add_rest(const Pair* weights, const Paired* const* values, long num_seen, long dim,
                       float* sums) {
    constexpr long PAIRS = PANEL / 2;
    constexpr uint32_t FIRST = 0xffff;
    using Words = Operand<HalfVec>;
    if (num_seen % 2 == 0) return;
    const long pair = num_seen / 2;
    const Pair* row = elements(values[pair / PAIRS]) + pair % PAIRS * dim;
    const Words weight = (weights[pair] & FIRST) - Words{};
    for (long d = 0; d < dim; d += 8) {
      const HalfVec sum = add(load_as<HalfVec>(sums + d), load<HalfVec>(row + d) & FIRST, weight);
      std::memcpy(sums + d, &sum, sizeof sum);
    }
  }
};
