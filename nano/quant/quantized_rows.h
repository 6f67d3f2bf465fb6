// Rows of activations in 8 bits, and dot products of four of them with four weights in every lane.
//
// All of it is integers, hence exact: VNNI, AVX2 and plain C++ give the same bits in any order of
// summation. A scale comes from the row's own numbers, never from its neighbours.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "layers/linear_operands.h"
#include "native/threads.h"
#include "native/vector.h"

using nano_linear::RowTiles;

// x[m, k] is about q[m, k] * scale[m, k / group]; the largest magnitude of a group becomes 127.
// The numbers of a tile's R rows lie side by side, so that a kernel follows one pointer.
struct QuantizedRows {
  RowTiles tiles;
  long num_words;   // of four inputs; zeros fill the last, and make their number even
  long num_groups;  // per row
  std::unique_ptr<int8_t[]> q;     // of each tile [num_words][R][4]
  std::unique_ptr<float[]> scale;  // of each tile [num_groups][R]; NaN if the group holds NaN or infinity
  std::unique_ptr<int32_t[]> sum;  // of each tile [num_groups][R]: of q
};

static inline void quantize_group(const float* x, long count, int8_t* q, float* scale, int32_t* sum) {
  int32_t largest = 0;  // of the magnitudes' bits: they compare like magnitudes, NaN above infinity
  for (long i = 0; i < count; i++) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  const bool is_finite = largest < 0x7f800000;
  float inverse = 127.0f / magnitude;
  // Infinite for magnitudes below 4e-37 as well: those count as zero.
  if (!is_finite || inverse > std::numeric_limits<float>::max()) inverse = 0.0f;
  int32_t total = 0;
  if (inverse == 0.0f) {
    for (long i = 0; i < count; i++) q[i] = 0;
    *scale = is_finite ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  } else {
    for (long i = 0; i < count; i++) {
      const int32_t nearest = (int32_t)__builtin_rintf(x[i] * inverse);  // halves to even
      q[i] = (int8_t)nearest;
      total += nearest;
    }
    *scale = magnitude / 127.0f;
  }
  *sum = total;
}

// x: [M][K]; group: how many inputs share a scale, a multiple of four or K.
static inline QuantizedRows quantize_rows(const float* x, long K, long group, RowTiles tiles) {
  const long M = tiles.num_rows, num_words = (K + 7) / 8 * 2, num_groups = (K + group - 1) / group;
  QuantizedRows rows{tiles,
                     num_words,
                     num_groups,
                     std::unique_ptr<int8_t[]>(new int8_t[M * num_words * 4]),
                     std::unique_ptr<float[]>(new float[M * num_groups]),
                     std::unique_ptr<int32_t[]>(new int32_t[M * num_groups])};
  auto quantize = [&](long tile) {
    const long start = tiles.start(tile), R = tiles.size(tile);
    std::vector<int8_t> row(num_words * 4);
    for (long r = 0; r < R; r++) {
      for (long g = 0; g < num_groups; g++) {
        const long at = start * num_groups + g * R + r;
        quantize_group(x + (start + r) * K + g * group, std::min(group, K - g * group),
                       row.data() + g * group, &rows.scale[at], &rows.sum[at]);
      }
      int8_t* to = rows.q.get() + start * num_words * 4 + r * 4;
      for (long word = 0; word < num_words; word++) std::memcpy(to + word * R * 4, &row[word * 4], 4);
    }
  };
  const long tiles_per_task = 32768 / (K * tiles.size(0)) + 1;  // fewer are not worth a thread's attention
  parallel_for((tiles.count + tiles_per_task - 1) / tiles_per_task, [&](long task) {
    const long first = task * tiles_per_task;
    for (long tile = first; tile < std::min(tiles.count, first + tiles_per_task); tile++) quantize(tile);
  });
  return rows;
}

// Four inputs of one row, in every lane.
static NANO_INLINE IntVec broadcast_word(const int8_t* q) {
  int32_t word;
  std::memcpy(&word, q, sizeof word);
  return word + IntVec{};
}

#if defined(__AVX512VNNI__) && defined(NANO_AVX512)
constexpr bool HAS_VNNI = true;
static NANO_INLINE IntVec dot_by_vnni(IntVec sum, WordVec w, IntVec x) {
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
#elif defined(__AVXVNNI__)
constexpr bool HAS_VNNI = true;
static NANO_INLINE IntVec dot_by_vnni(IntVec sum, WordVec w, IntVec x) {
  return (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
#else
constexpr bool HAS_VNNI = false;
static NANO_INLINE IntVec dot_by_vnni(IntVec sum, WordVec, IntVec) { return sum; }
#endif

#if defined(__AVX2__) && !defined(NANO_AVX512)
constexpr bool HAS_PAIR_SUMS = true;
// Products of unsigned and signed bytes, summed by fours. Two products must fit 16 bits.
static NANO_INLINE IntVec dot_by_pairs(IntVec sum, __m256i w, __m256i x) {
  return sum + (IntVec)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
}
static NANO_INLINE IntVec dot_unsigned_without_vnni(IntVec sum, WordVec w, IntVec x) {
  return dot_by_pairs(sum, (__m256i)w, (__m256i)x);
}
static NANO_INLINE IntVec dot_signed_without_vnni(IntVec sum, WordVec w, IntVec x) {
  // |w| times x with the sign of w: at most 128 * 127 twice.
  return dot_by_pairs(sum, _mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w));
}
#else
constexpr bool HAS_PAIR_SUMS = false;
static NANO_INLINE IntVec dot_unsigned_without_vnni(IntVec sum, WordVec w, IntVec x) {
  for (int left = 24; left >= 0; left -= 8) sum += (IntVec)(w << left >> 24) * (x << left >> 24);
  return sum;
}
static NANO_INLINE IntVec dot_signed_without_vnni(IntVec sum, WordVec w, IntVec x) {
  for (int left = 24; left >= 0; left -= 8) sum += ((IntVec)w << left >> 24) * (x << left >> 24);
  return sum;
}
#endif

constexpr bool HAS_DOTS = HAS_VNNI || HAS_PAIR_SUMS;  // else: byte by byte, right and slow

// sum + w . x in every lane, for four weights of 0 .. 15 each and four signed inputs.
static NANO_INLINE IntVec dot_unsigned(IntVec sum, WordVec w, IntVec x) {
  return HAS_VNNI ? dot_by_vnni(sum, w, x) : dot_unsigned_without_vnni(sum, w, x);
}

// The same for signed weights. VNNI wants them unsigned: `dot_operand` adds 128 to each, and whoever sums
// takes DOT_OFFSET times the sum of x from the result.
constexpr int32_t DOT_OFFSET = HAS_VNNI ? 128 : 0;

static NANO_INLINE WordVec dot_operand(WordVec w) { return HAS_VNNI ? w ^ 0x80808080u : w; }

static NANO_INLINE IntVec dot_signed(IntVec sum, WordVec w, IntVec x) {
  return HAS_VNNI ? dot_by_vnni(sum, w, x) : dot_signed_without_vnni(sum, w, x);
}
