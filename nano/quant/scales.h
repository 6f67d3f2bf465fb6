// Scales of quantised weights: float32, or float16 when every one of them fits.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "native/vector.h"

struct Float16 {
  uint16_t bits;
};

static NANO_INLINE Vec load_scales(const float* p) { return load(p); }

// Exact: float32 holds every float16. Infinity and NaN are never stored.
static NANO_INLINE Vec load_scales(const Float16* p) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return (Vec)_mm512_maskz_cvtph_ps((__mmask16)-1, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
  Halves halves;
  std::memcpy(&halves, p, sizeof halves);
  const WordVec bits = __builtin_convertvector(halves, WordVec);
  const Vec magnitude = (Vec)((bits & 0x7fff) << 13) * broadcast(0x1p112f);  // the exponent's bias
  return (Vec)((WordVec)magnitude | (bits & 0x8000) << 16);
#endif
}
