// Vectors of float by GCC's vector extensions: one source for AVX2, AVX-512, NEON and plain C++.
// Arithmetic on them is elementwise, so a result need not depend on the width.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define NANO_AVX512  // 32 registers, and masks
#include <immintrin.h>
constexpr int LANES = 16;
#else
constexpr int LANES = 8;  // elsewhere the compiler splits it into what the CPU has
#endif

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t WordVec __attribute__((vector_size(4 * LANES), aligned(4)));

// Always inlined: a product that is added is fused where the compiler sees both, so whether a function is
// inlined would otherwise decide about bits.
#define NANO_INLINE inline __attribute__((always_inline))

// Loads and stores go through types of alignment 4: any float address will do.
static NANO_INLINE Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
static NANO_INLINE WordVec load(const uint32_t* p) { return *reinterpret_cast<const WordVec*>(p); }
static NANO_INLINE void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
static NANO_INLINE Vec broadcast(float x) { return x - Vec{}; }

// The larger and the smaller of each pair; that of b if one is NaN. One instruction, which compilers do not
// find by themselves.
static NANO_INLINE Vec larger(Vec a, Vec b) {
#if defined(NANO_AVX512)
  return reinterpret_cast<Vec>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
  return a > b ? a : b;
#endif
}
static NANO_INLINE Vec smaller(Vec a, Vec b) {
#if defined(NANO_AVX512)
  return reinterpret_cast<Vec>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#else
  return a < b ? a : b;
#endif
}

// x * 2^n, rounded once. n: integers from -254 to 254.
static NANO_INLINE Vec times_power_of_two(Vec x, Vec n) {
#if defined(NANO_AVX512)
  return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(n)));
#else
  // In two factors: each is a normal float where 2^n itself is not.
  const IntVec whole = __builtin_convertvector(n, IntVec), half = whole >> 1;
  const IntVec first = (half + 127) << 23, second = (whole - half + 127) << 23;
  return (x * reinterpret_cast<Vec>(first)) * reinterpret_cast<Vec>(second);
#endif
}
