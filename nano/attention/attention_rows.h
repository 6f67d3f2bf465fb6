// The arithmetic of attention within one head: rows of queries against panels of sixteen positions.
// Nothing here knows of pages, requests or threads.
//
// The order of every sum is the point. A score is one chain of fused multiply-adds over the head's
// dimensions. Absolute positions fall into ranges of RANGE: in each a row has a softmax of its own, with
// one chain over the positions, and the ranges are merged in ascending order. How rows are grouped, how
// wide a vector is, and where a chunk ends changes no bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "math.h"
#include "native/pairs.h"
#include "vector.h"

constexpr long RANGE = 256;             // positions under one softmax; part of the numerics
constexpr long PANEL = 16;              // positions whose keys lie side by side
constexpr long AHEAD = 4;               // panels from one that is used to one that is prefetched
constexpr int MAX_ROWS = 6;             // rows whose sums are held in registers ...
constexpr int WIDE = LANES == 16 ? 4 : 1;  // ... times panels: 24 of 32 registers, or 12 of 16

// Called, not inlined: they are instantiated often, and compiled on a machine's first start.
#define NANO_KERNEL __attribute__((noinline)) void

struct BFloat16 {
  uint16_t bits;
};

static NANO_INLINE float to_float(float x) { return x; }
static NANO_INLINE float to_float(BFloat16 x) {
  const uint32_t word = (uint32_t)x.bits << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

template <class T>
static NANO_INLINE T from_float(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else
    return {nearest_bfloat16(x)};
}

typedef float HalfVec __attribute__((vector_size(4 * 8)));  // for a head's last eight dimensions

template <int SIZE>
struct Integers;
template <>
struct Integers<8> {
  typedef uint16_t Shorts __attribute__((vector_size(2 * 8)));
  typedef uint32_t Words __attribute__((vector_size(4 * 8)));
};
template <>
struct Integers<16> {
  typedef uint16_t Shorts __attribute__((vector_size(2 * 16)));
  typedef uint32_t Words __attribute__((vector_size(4 * 16)));
};

// A vector V of floats from anywhere. By memcpy: a template argument loses its attribute of alignment.
template <class V>
static NANO_INLINE V load_as(const float* p) {
  V vector;
  std::memcpy(&vector, p, sizeof vector);
  return vector;
}
template <class V>
static NANO_INLINE V load_as(const BFloat16* p) {
  using Types = Integers<sizeof(V) / sizeof(float)>;
  typename Types::Shorts shorts;
  std::memcpy(&shorts, p, sizeof shorts);
  return reinterpret_cast<V>(__builtin_convertvector(shorts, typename Types::Words) << 16);
}

// a * b + c, rounded once where the CPU can. GCC, told to fuse, still does not in some of several like
// chains of 256 bits when it tunes for Zen; and rows would then differ by what they are grouped with.
template <class V>
static NANO_INLINE V multiply_add(V a, V b, V c) {
#if defined(__FMA__)
  if constexpr (sizeof(V) == 32) return __builtin_ia32_vfmaddps256(a, b, c);
#endif
  return a * b + c;
}

// What a cache of T holds where, and how it is multiplied. This is for floats: float and BFloat16.
template <class T>
struct Format {
  using Copy = float;  // as which panels are copied that cannot be read where they lie

  // Where a block keeps dimension `d` of a key and of a value. Keys lie in panels of `width` positions; if
  // that is not PANEL, they are read from a copy.
  static long of_key(long position, long d, long width, long dim) {
    return position / width * width * dim + d * width + position % width;
  }
  static long of_value(long position, long d, long, long dim) { return position * dim + d; }

  // A unit is what one factor multiplies: so many dimensions of a key, or positions of a value.
  static constexpr long UNIT = 1;
  using Factor = float;  // queries and weights
  using Element = T;     // units of one position's key, or of one dimension's values
  template <class V>
  using Operand = V;  // elements, as many as V has floats

  template <class V>
  static NANO_INLINE V load(const Element* p) {
    return load_as<V>(p);
  }
  template <class V>
  static NANO_INLINE V add(V sum, V operand, V factor) {
    return multiply_add(factor, operand, sum);
  }

  static void store_query(const float* q, float scale, long dim, float* to) {
    for (long d = 0; d < dim; d++) to[d] = q[d] * scale;
  }
  static void store_weights(float*) {}  // in their place
  // The positions beyond whole units of the `num_seen` that a row sees.
  static void add_rest(const Factor*, const T* const*, long, long, float*) {}
};

template <class T>
static NANO_INLINE const typename Format<T>::Element* elements(const T* panel) {
  return reinterpret_cast<const typename Format<T>::Element*>(panel);
}

// A row's queries or weights as factors. There may be fewer of them: a row begins where it would as floats.
template <class T>
static NANO_INLINE const typename Format<T>::Factor* factors(const float* row) {
  return reinterpret_cast<const typename Format<T>::Factor*>(row);
}

// The scores of ROWS rows against PANELS panels. q: [ROWS][dim]; a panel of keys: [dim / UNIT][PANEL];
// scores: [ROWS][RANGE], from the first panel's place on.
template <int ROWS, int PANELS, class T>
NANO_KERNEL score_panels(const float* q, const T* const* keys, long dim, float* scores) {
  using F = Format<T>;
  using Operand = typename F::template Operand<Vec>;
  constexpr int VECS = PANELS * PANEL / LANES;
  const long num_units = dim / F::UNIT;
  Vec sums[ROWS][VECS] = {};
  for (int p = 0; p < PANELS; p++) {  // with each part of the dimensions, one of the panels ahead is fetched
    const auto* next = elements(keys[p + AHEAD]);
    for (long d = num_units * p / PANELS; d < num_units * (p + 1) / PANELS; d++, next += PANELS * PANEL) {
      Operand key[VECS];
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++)
        key[v] = F::template load<Vec>(elements(keys[v * LANES / PANEL]) + d * PANEL + v * LANES % PANEL);
#pragma GCC unroll 4
      for (int i = 0; i < PANELS; i++) __builtin_prefetch(next + i * PANEL, 0, 2);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        const Operand factor = factors<T>(q + r * dim)[d] - Operand{};
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[r][v] = F::add(sums[r][v], key[v], factor);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) store(scores + r * RANGE + v * LANES, sums[r][v]);
}

template <int ROWS, class T>
inline void score(const float* q, const T* const* keys, long num_panels, long dim, float* scores) {
  long p = 0;
  for (; p + WIDE <= num_panels; p += WIDE)
    score_panels<ROWS, WIDE>(q, keys + p, dim, scores + p * PANEL);
  for (; p < num_panels; p++) score_panels<ROWS, 1>(q, keys + p, dim, scores + p * PANEL);
}

// Add to sums[ROWS][dim] the values of the units of positions [from, to), times weights[ROWS][RANGE]: VECS
// vectors V of dimensions from `at` on. A panel of values: [PANEL / UNIT][dim].
template <int ROWS, int VECS, class V, class T>
NANO_KERNEL add_columns(const float* weights, const T* const* values, long from, long to, long dim,
                        long at, float* sums) {
  using F = Format<T>;
  using Operand = typename F::template Operand<V>;
  constexpr long WIDTH = sizeof(V) / sizeof(float), UNITS = PANEL / F::UNIT;
  V column[ROWS][VECS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++) column[r][v] = load_as<V>(sums + r * dim + at + v * WIDTH);
  for (long t = from; t < to;) {
    const auto* row = elements(values[t / UNITS]) + t % UNITS * dim + at;
    const auto* next = elements(values[t / UNITS + AHEAD]) + t % UNITS * dim + at;
    const long end = std::min(to, (t / UNITS + 1) * UNITS);
    for (; t < end; t++, row += dim, next += dim) {
      Operand value[VECS];
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v++) value[v] = F::template load<V>(row + v * WIDTH);
#pragma GCC unroll 4
      for (int p = 0; p < VECS * WIDTH / PANEL; p++) __builtin_prefetch(next + p * PANEL, 0, 2);
#pragma GCC unroll 6
      for (int r = 0; r < ROWS; r++) {
        const Operand weight = factors<T>(weights + r * RANGE)[t] - Operand{};
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) column[r][v] = F::add(column[r][v], value[v], weight);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < VECS; v++)
      std::memcpy(sums + r * dim + at + v * WIDTH, &column[r][v], sizeof(V));
}

template <int ROWS, class T>
inline void add_values(const float* weights, const T* const* values, long from, long to, long dim,
                       float* sums) {
  constexpr int VECS = WIDE * PANEL / LANES;
  long at = 0;
  for (; at + VECS * LANES <= dim; at += VECS * LANES)
    add_columns<ROWS, VECS, Vec>(weights, values, from, to, dim, at, sums);
  for (; at + LANES <= dim; at += LANES)
    add_columns<ROWS, 1, Vec>(weights, values, from, to, dim, at, sums);
  if (at < dim) add_columns<ROWS, 1, HalfVec>(weights, values, from, to, dim, at, sums);
}

// Add to the sums of ROWS rows the values of the positions that each sees, num_seen(row) of them. A position
// that a row does not see is never multiplied, not even by zero: its value may be NaN.
template <int ROWS, class T, class NumSeen>
inline void add_seen(const float* weights, const T* const* values, NumSeen&& num_seen, long dim,
                     float* sums) {
  constexpr long UNIT = Format<T>::UNIT;
  const long num_shared = num_seen(0) / UNIT;  // the first row sees least
  add_values<ROWS>(weights, values, 0, num_shared, dim, sums);
  for (long r = 0; r < ROWS; r++, weights += RANGE, sums += dim) {
    const long num_units = num_seen(r) / UNIT;
    if (num_units > num_shared) add_values<1>(weights, values, num_shared, num_units, dim, sums);
    Format<T>::add_rest(factors<T>(weights), values, num_seen(r), dim, sums);
  }
}

// The lanes of a panel folded into one by `combine`, in an order that no vector width changes.
template <class Combine>
inline float fold(const Vec* panel, Combine&& combine) {
  float lanes[PANEL];
  for (int v = 0; v < PANEL / LANES; v++) store(lanes + v * LANES, panel[v]);
  for (long half = PANEL / 2; half; half /= 2)
    for (long i = 0; i < half; i++) lanes[i] = combine(lanes[i], lanes[i + half]);
  return lanes[0];
}

// Turn a row's scores of `num_seen` positions into weights 2^(score - best), and sum them into `mass`.
// What follows them in their last panel is overwritten.
inline void soften(float* scores, long num_seen, float& best, float& mass) {
  constexpr int VECS = PANEL / LANES;
  const long end = (num_seen + PANEL - 1) / PANEL * PANEL;
  for (long i = num_seen; i < end; i++) scores[i] = -INFINITY;
  Vec largest[VECS], sums[VECS] = {};
  for (int v = 0; v < VECS; v++) largest[v] = broadcast(-INFINITY);
  for (long i = 0; i < end; i += PANEL)
    for (int v = 0; v < VECS; v++)  // passes over NaN, which e^x keeps
      largest[v] = larger(load(scores + i + v * LANES), largest[v]);
  best = fold(largest, [](float a, float b) { return a > b ? a : b; });
  for (long i = 0; i < end; i += PANEL)
    for (int v = 0; v < VECS; v++) {
      const Vec weight = exponential_of_two(load(scores + i + v * LANES) - broadcast(best));
      sums[v] += weight;
      store(scores + i + v * LANES, weight);
    }
  mass = fold(sums, [](float a, float b) { return a + b; });
}

// What rows have gathered so far. Their attention is sums / mass.
struct State {
  float* best;  // [rows]: the largest score
  float* mass;  // [rows]: the sum of weights
  float* sums;  // [rows][dim]: of weighted values
};

// Let rows [first, last) of `state` take in what they gathered in the next range.
inline void merge(const State& state, const State& next, long first, long last, long dim) {
  for (long r = first; r < last; r++) {
    const bool is_larger = next.best[r] > state.best[r];
    const State &large = is_larger ? next : state, &small = is_larger ? state : next;
    const float factor = exponential_of_two(broadcast(small.best[r] - large.best[r]))[0];
    const float *most = large.sums + r * dim, *rest = small.sums + r * dim;
    float* sums = state.sums + r * dim;
    for (long d = 0; d < dim; d++) sums[d] = most[d] + rest[d] * factor;
    state.mass[r] = large.mass[r] + small.mass[r] * factor;
    state.best[r] = large.best[r];
  }
}
