// Scales of quantised weights: float32, or float16 when every one of them fits.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "native/tensor.h"
#include "native/vector.h"

// Exact: float32 holds every float16. Infinity and NaN are never stored.
static NANO_INLINE Vec load_float16(const uint16_t* p) {
#if defined(NANO_AVX512)
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

struct Scales {
  const void* data;
  bool are_float16;

  explicit Scales(const Tensor& scales)
      : data(scales.const_data_ptr()), are_float16(scales.element_size() == 2) {}

  // LANES neighbours from the one at `index` on.
  NANO_INLINE Vec at(long index) const {
    return are_float16 ? load_float16(static_cast<const uint16_t*>(data) + index)
                       : load(static_cast<const float*>(data) + index);
  }
};
