// Elementary functions on Vec: elementwise, so that a value's bits depend on nothing but the value.
#pragma once

#include "vector.h"

// e^x, at most 1.01 ulp off. NaN stays NaN, overflow is infinity, and results below the least normal float
// are as right as denormals can be. (Cephes' reduction and polynomial.)
static NANO_INLINE Vec exponential(Vec x) {
  x = smaller(broadcast(89.0f), larger(broadcast(-104.0f), x));  // beyond: infinity and zero
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x * broadcast(1.44269504f) + magic) - magic;
  Vec r = x - n * broadcast(0.693359375f);  // ln 2 in two parts, the first exact times any n
  r = r - n * broadcast(-2.12194440e-4f);
  Vec p = broadcast(1.9875691500e-4f);
  p = p * r + broadcast(1.3981999507e-3f);
  p = p * r + broadcast(8.3334519073e-3f);
  p = p * r + broadcast(4.1665795894e-2f);
  p = p * r + broadcast(1.6666665459e-1f);
  p = p * r + broadcast(5.0000001201e-1f);
  p = (r * r) * p + r;
  return times_power_of_two(p + broadcast(1.0f), n);
}

// 2^x for x <= 0, at most 0.88 ulp off, in fewer instructions than e^x. NaN stays NaN, and results below
// the least normal float are as right as denormals can be.
static NANO_INLINE Vec exponential_of_two(Vec x) {
#if defined(NANO_AVX512)
  constexpr int TO_NEAREST = 0x08;
  const Vec n = reinterpret_cast<Vec>(_mm512_roundscale_ps(reinterpret_cast<__m512>(x), TO_NEAREST));
  const Vec r = reinterpret_cast<Vec>(_mm512_reduce_ps(reinterpret_cast<__m512>(x), TO_NEAREST));  // x - n
#else
  x = larger(broadcast(-151.0f), x);  // below: zero
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec n = (x + magic) - magic, r = x - n;
#endif
  // Of those that are 1 at 0 the one of least relative error on [-1/2, 1/2].
  Vec p = broadcast(1.5353361911e-4f);
  p = p * r + broadcast(1.3398874414e-3f);
  p = p * r + broadcast(9.6184373577e-3f);
  p = p * r + broadcast(5.5503324711e-2f);
  p = p * r + broadcast(2.4022647914e-1f);
  p = p * r + broadcast(6.9314720286e-1f);
  p = p * r + broadcast(1.0f);
  return times_power_of_two(p, n);
}

// ln x, at most 1.01 ulp off. NaN and negative numbers give NaN, zero -infinity, infinity itself.
// (Cephes' polynomial; terms are arranged so that no sum has two products to choose a fused one from.)
static NANO_INLINE Vec logarithm(Vec x) {
  const IntVec is_denormal = x < broadcast(1.17549435e-38f);
  const Vec normal = is_denormal ? x * broadcast(33554432.0f) : x;  // 2^25
  // x = 2^n m with m in [sqrt(1/2), sqrt(2)): subtracting the bits of sqrt(1/2) leaves n in the exponent.
  const IntVec bits = reinterpret_cast<IntVec>(normal), exponent = (bits - 0x3f3504f3) >> 23;
  const Vec f = reinterpret_cast<Vec>(bits - (exponent << 23)) - broadcast(1.0f);
  const Vec n = __builtin_convertvector(exponent - (is_denormal & 25), Vec);
  Vec p = broadcast(7.0376836292e-2f);
  p = p * f + broadcast(-1.1514610310e-1f);
  p = p * f + broadcast(1.1676998740e-1f);
  p = p * f + broadcast(-1.2420140846e-1f);
  p = p * f + broadcast(1.4249322787e-1f);
  p = p * f + broadcast(-1.6668057665e-1f);
  p = p * f + broadcast(2.0000714765e-1f);
  p = p * f + broadcast(-2.4999993993e-1f);
  p = p * f + broadcast(3.3333331174e-1f);
  p = p * f + broadcast(-0.5f);
  Vec r = (f * f) * p + f;
  r = r + n * broadcast(-2.12194440e-4f);  // ln 2 in two parts, the first exact times any n
  r = r + n * broadcast(0.693359375f);
  const Vec infinity = broadcast(__builtin_inff());
  r = x == infinity ? infinity : r;
  r = x == broadcast(0.0f) ? -infinity : r;
  return x >= broadcast(0.0f) ? r : broadcast(__builtin_nanf(""));
}
