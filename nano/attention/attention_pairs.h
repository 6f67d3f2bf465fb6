// The arithmetic of attention over a cache of bfloat16 in which queries and weights are rounded as well, two
// products at a time: a key's dimensions and a value's positions lie in pairs.
//
// Sums are of float32, and each is one chain of pairs, by rows, panels and ranges as in attention_rows.h.
#pragma once

#include "attention_rows.h"

struct Paired {
  uint16_t bits;
};

// Keys: [dim / 2][width][2]; values: [PANEL / 2][dim][2], where a block is of whole panels.
template <>
struct Layout<Paired> {
  using Copy = Paired;
  static long of_key(long position, long d, long width, long dim) {
    return position / width * width * dim + d / 2 * 2 * width + position % width * 2 + d % 2;
  }
  static long of_value(long position, long d, long width, long dim) {
    return width == PANEL ? position / 2 * 2 * dim + d * 2 + position % 2 : position * dim + d;
  }
};

static NANO_INLINE const Pair* words_of(const Paired* panel) {
  return reinterpret_cast<const Pair*>(panel);
}

template <class W, class T>
static NANO_INLINE W load_words(const T* p) {
  W words;
  std::memcpy(&words, p, sizeof words);
  return words;
}

// As for other caches. q: [ROWS][dim], of which the first halves are pairs; a panel of keys: [dim / 2][PANEL].
template <int ROWS, int PANELS>
NANO_KERNEL score_pairs(const Pair* q, const Paired* const* keys, long num_pairs, float* scores) {
  constexpr int VECS = PANELS * PANEL / LANES;
  Vec sums[ROWS][VECS] = {};
  for (int p = 0; p < PANELS; p++) {
    const Pair* next = words_of(keys[p + AHEAD]);
    for (long d = num_pairs * p / PANELS; d < num_pairs * (p + 1) / PANELS; d++, next += PANELS * PANEL) {
      WordVec key[VECS];
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++)
        key[v] = load(words_of(keys[v * LANES / PANEL]) + d * PANEL + v * LANES % PANEL);
#pragma GCC unroll 4
      for (int i = 0; i < PANELS; i++) __builtin_prefetch(next + i * PANEL, 0, 2);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        const WordVec factor = q[r * 2 * num_pairs + d] - WordVec{};
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[r][v] = add_pair_products(sums[r][v], key[v], factor);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) store(scores + r * RANGE + v * LANES, sums[r][v]);
}

template <int ROWS>
inline void score(const float* q, const Paired* const* keys, long num_panels, long dim, float* scores) {
  const Pair* pairs = reinterpret_cast<const Pair*>(q);
  long p = 0;
  for (; p + WIDE <= num_panels; p += WIDE)
    score_pairs<ROWS, WIDE>(pairs, keys + p, dim / 2, scores + p * PANEL);
  for (; p < num_panels; p++) score_pairs<ROWS, 1>(pairs, keys + p, dim / 2, scores + p * PANEL);
}

// As add_columns, with the pairs of positions [from, to) and weights [ROWS][RANGE] words.
template <int ROWS, int VECS, class V>
NANO_KERNEL add_pair_columns(const Pair* weights, const Paired* const* values, long from, long to, long dim,
                             long at, float* sums) {
  constexpr long WIDTH = sizeof(V) / sizeof(float), PAIRS = PANEL / 2;
  using Words = typename Integers<WIDTH>::Words;
  V column[ROWS][VECS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) column[r][v] = load_as<V>(sums + r * dim + at + v * WIDTH);
  for (long t = from; t < to;) {
    const Pair* row = words_of(values[t / PAIRS]) + t % PAIRS * dim + at;
    const Pair* next = words_of(values[t / PAIRS + AHEAD]) + t % PAIRS * dim + at;
    const long end = std::min(to, (t / PAIRS + 1) * PAIRS);
    for (; t < end; t++, row += dim, next += dim) {
      Words value[VECS];
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) value[v] = load_words<Words>(row + v * WIDTH);
#pragma GCC unroll 4
      for (int p = 0; p < VECS * WIDTH / PANEL; p++) __builtin_prefetch(next + p * PANEL, 0, 2);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        const Words weight = weights[r * RANGE + t] - Words{};
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) column[r][v] = add_pair_products(column[r][v], value[v], weight);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++)
      std::memcpy(sums + r * dim + at + v * WIDTH, &column[r][v], sizeof(V));
}

template <int ROWS>
inline void add_pairs(const Pair* weights, const Paired* const* values, long from, long to, long dim,
                      float* sums) {
  constexpr int VECS = WIDE * PANEL / LANES;
  long at = 0;
  for (; at + VECS * LANES <= dim; at += VECS * LANES)
    add_pair_columns<ROWS, VECS, Vec>(weights, values, from, to, dim, at, sums);
  for (; at + LANES <= dim; at += LANES)
    add_pair_columns<ROWS, 1, Vec>(weights, values, from, to, dim, at, sums);
  if (at < dim) add_pair_columns<ROWS, 1, HalfVec>(weights, values, from, to, dim, at, sums);
}

// The last position that a row sees, if it does not see the other one of the pair: that one's values are left out.
inline void add_first_of_pair(const Pair* weights, const Paired* const* values, long pair, long dim,
                              float* sums) {
  constexpr long PAIRS = PANEL / 2, PART = 8;
  const Pair* row = words_of(values[pair / PAIRS]) + pair % PAIRS * dim;
  for (long d = 0; d < dim; d += PART) {
    Integers<PART>::Words value = load_words<Integers<PART>::Words>(row + d) & 0xffffu;
    const Integers<PART>::Words weight = (weights[pair] & 0xffffu) - Integers<PART>::Words{};
    const HalfVec sum = add_pair_products(load_as<HalfVec>(sums + d), value, weight);
    std::memcpy(sums + d, &sum, sizeof sum);
  }
}

template <int ROWS, class NumSeen>
inline void add_seen(const float* weights, const Paired* const* values, NumSeen&& num_seen, long dim,
                     float* sums) {
  const Pair* pairs = reinterpret_cast<const Pair*>(weights);
  const long num_shared = num_seen(0) / 2;  // the first row sees least
  add_pairs<ROWS>(pairs, values, 0, num_shared, dim, sums);
  for (long r = 0; r < ROWS; r++, pairs += RANGE, sums += dim) {
    if (num_seen(r) / 2 > num_shared) add_pairs<1>(pairs, values, num_shared, num_seen(r) / 2, dim, sums);
    if (num_seen(r) % 2) add_first_of_pair(pairs, values, num_seen(r) / 2, dim, sums);
  }
}

template <>
inline void store_query<Paired>(const float* q, float scale, long dim, float* to) {
  float scaled[PANEL];
  for (long d = 0; d < dim; d += PANEL) {
    const long count = std::min(PANEL, dim - d);
    for (long i = 0; i < count; i++) scaled[i] = q[d + i] * scale;
    round_to_pairs(scaled, count, reinterpret_cast<Pair*>(to) + d / 2);
  }
}

template <>
inline void store_weights<Paired>(float* weights) {
  round_to_pairs(weights, RANGE, reinterpret_cast<Pair*>(weights));
}
