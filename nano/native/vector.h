// Vectors of float by GCC's vector extensions: one source for AVX2, AVX-512, NEON and plain C++.
// Arithmetic on them is elementwise, so a result need not depend on the width.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NANO_AVX512  // 32 registers, and masks
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
