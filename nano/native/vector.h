// Vectors of float by GCC's vector extensions: one source for AVX2, AVX-512, NEON and plain C++.
// Arithmetic on them is elementwise, so a result never depends on the width.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int LANES = 8;

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t WordVec __attribute__((vector_size(4 * LANES), aligned(4)));

// Loads and stores go through types of alignment 4: any float address will do.
static inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
static inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
static inline Vec broadcast(float x) { return Vec{x, x, x, x, x, x, x, x}; }

// Sum of the lanes, always in this order.
static inline float sum(Vec v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
