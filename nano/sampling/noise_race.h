// The noise of nano/sampling/noise.py in vectors, and the race that it decides.
#pragma once

#include "native/math.h"
#include "sampling/logits_rows.h"

namespace nano_sampling {

struct NoiseKey {
  uint32_t first, second;
};

static NoiseKey noise_key(int64_t seed, int64_t position) {
  uint64_t word = (uint64_t)seed + 0x9E3779B97F4A7C15u * ((uint64_t)position + 1);
  for (int round = 0; round < 2; round++) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    word ^= word >> 31;
  }
  return {(uint32_t)(word >> 32), (uint32_t)word};
}

static NANO_INLINE WordVec mix(WordVec x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

static NANO_INLINE WordVec random_bits(NoiseKey key, WordVec ids) {
  return mix(mix(ids * 0x9E3779B1u + key.first) ^ key.second);
}

// (bits + 0.5) * 2^-32, below 1. In halves, so that a small one keeps all of float32's precision.
static NANO_INLINE Vec uniform(WordVec bits) {
  const Vec high = __builtin_convertvector(reinterpret_cast<IntVec>(bits >> 16), Vec);
  const Vec low = __builtin_convertvector(reinterpret_cast<IntVec>(bits & 0xffffu), Vec) + broadcast(0.5f);
  const Vec u = (high * broadcast(65536.0f) + low) * broadcast(0x1p-32f);
  const Vec largest = broadcast(1.0f - 0x1p-24f);
  return u < largest ? u : largest;
}

// log E, where E = -log1p(-u).
static NANO_INLINE Vec log_exponential(Vec u) {
  const Vec rest = broadcast(1.0f) - u;
  const Vec lost = (broadcast(1.0f) - rest) - u;  // what the rounding of `rest` took, exactly
  return logarithm(-(logarithm(rest) + lost / rest));
}

// No less than -log E, in few operations: E >= u, and the bits of a float, read as a number, are a lower
// bound of its binary logarithm.
static NANO_INLINE Vec most_of_noise(Vec u) {
  constexpr float LN2 = 0.69314718f, MARGIN = 1e-3f;
  const Vec exponent = __builtin_convertvector(reinterpret_cast<IntVec>(u), Vec);
  return exponent * broadcast(-LN2 * 0x1p-23f) + broadcast(127.0f * LN2 + MARGIN);
}

// The winner of the exponential race over scaled logits: argmax of scaled - log E. Only tokens that may yet
// win get their noise computed. favourite: any token that can be drawn; a likely winner saves time.
static long race(const float* scaled, long num_blocks, NoiseKey key, long favourite) {
  const Vec most = broadcast(22.9f);  // -log E is never larger
  WordVec ids;
  for (int l = 0; l < LANES; l++) ids[l] = l;
  long winner = favourite;
  const Vec its_u = uniform(random_bits(key, WordVec{} + (uint32_t)favourite));
  float best = scaled[favourite] - log_exponential(its_u)[0];
  for (long i = 0; i < num_blocks * BLOCK; i += LANES, ids += LANES) {
    const Vec value = load(scaled + i);
    if (!at_least(value + most, broadcast(best))) continue;
    const Vec u = uniform(random_bits(key, ids));
    uint32_t mask = at_least(value + most_of_noise(u), broadcast(best));
    if (!mask) continue;
    const Vec score = value - log_exponential(u);
    for (; mask; mask &= mask - 1) {
      const int l = __builtin_ctz(mask);
      const bool is_better = score[l] > best || (score[l] == best && i + l < winner);
      if (is_better) best = score[l], winner = i + l;
    }
  }
  return winner;
}

}  // namespace nano_sampling
