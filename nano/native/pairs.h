// Pairs of bfloat16 that share a 32-bit word, the first in its low half.
#pragma once

#include "native/vector.h"

#if defined(__AVX512BF16__) && defined(NANO_AVX512)
#define NANO_PAIRS  // are multiplied by one instruction
#endif

typedef uint32_t Pair __attribute__((may_alias));  // they may take the place of the floats they come from

// To the nearest, halves to even; NaN stays NaN.
static NANO_INLINE uint16_t nearest_bfloat16(float x) {
  uint32_t word;
  std::memcpy(&word, &x, sizeof word);
  return (uint16_t)(x == x ? (word + 0x7fff + (word >> 16 & 1)) >> 16 : word >> 16 | 0x40);
}

// `count` floats, rounded, as ceil(count / 2) pairs; an odd one gets a zero beside it. In place if asked.
static inline void round_to_pairs(const float* x, long count, Pair* pairs) {
  long i = 0;
#if defined(NANO_PAIRS)
  for (; i + LANES <= count; i += LANES) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)load(x + i));
    std::memcpy(pairs + i / 2, &rounded, sizeof rounded);
  }
#endif
  for (; i < count; i += 2) {
    const uint32_t high = i + 1 < count ? nearest_bfloat16(x[i + 1]) : 0;
    pairs[i / 2] = high << 16 | nearest_bfloat16(x[i]);
  }
}

// sum + a . b in every lane: the products are exact, and rounded into the sum one after the other or, where
// one instruction does both, as the CPU likes. V: 8 or 16 lanes of float, W: as many words.
template <class V, class W>
static NANO_INLINE V add_pair_products(V sum, W a, W b) {
#if defined(NANO_PAIRS)
  if constexpr (sizeof(V) == 64)
    return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  else
    return (V)_mm256_dpbf16_ps((__m256)sum, (__m256bh)a, (__m256bh)b);
#else
  sum += reinterpret_cast<V>(a & 0xffff0000u) * reinterpret_cast<V>(b & 0xffff0000u);
  return sum + reinterpret_cast<V>(a << 16) * reinterpret_cast<V>(b << 16);
#endif
}
