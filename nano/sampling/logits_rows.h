// Rows of logits, as sampling reads them: sums in one order, the largest ones, nothing sorted.
//
// Sums go through 32 partial sums per block of 512 tokens, collected in float64, at any vector width.
// Maxima and counts do not depend on an order; of equals the lowest token id wins.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "native/vector.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace nano_sampling {

typedef double DoubleVec __attribute__((vector_size(8 * LANES)));

constexpr long WIDTH = 32;   // partial sums, whatever the vectors are
constexpr long BLOCK = 512;  // tokens added up in float32 before the sum moves on to float64
constexpr float INF = std::numeric_limits<float>::infinity();

// Bit l is set where a[l] >= b[l]. NaN is never at least anything.
static NANO_INLINE uint32_t at_least(Vec a, Vec b) {
#if defined(NANO_AVX512)
  return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), _CMP_GE_OQ);
#elif defined(__AVX__)
  return _mm256_movemask_ps(
      _mm256_cmp_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), _CMP_GE_OQ));
#else
  uint32_t mask = 0;
  for (int l = 0; l < LANES; l++) mask |= (uint32_t)(a[l] >= b[l]) << l;
  return mask;
#endif
}

// Store the lanes of v that mask names, side by side. May write LANES floats. Returns how many are named.
static NANO_INLINE int store_some(float* to, Vec v, uint32_t mask) {
#if defined(NANO_AVX512)
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask, reinterpret_cast<__m512>(v)));
  return __builtin_popcount(mask);
#else
  int count = 0;
  for (; mask; mask &= mask - 1) to[count++] = v[__builtin_ctz(mask)];
  return count;
#endif
}

static NANO_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static NANO_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Sum of value(i), the vector at index i, over whole blocks.
template <class Value>
static NANO_INLINE double ordered_sum(long num_blocks, Value value) {
  constexpr long PARTS = WIDTH / LANES;
  DoubleVec sums[PARTS] = {};
  for (long b = 0; b < num_blocks; b++) {
    Vec parts[PARTS] = {};
    for (long i = b * BLOCK; i < (b + 1) * BLOCK; i += WIDTH)
#pragma GCC unroll 4
      for (long p = 0; p < PARTS; p++) parts[p] += value(i + p * LANES);
    for (long p = 0; p < PARTS; p++) sums[p] += __builtin_convertvector(parts[p], DoubleVec);
  }
  double partial[WIDTH];
  std::memcpy(partial, sums, sizeof partial);
  for (long half = WIDTH / 2; half > 0; half /= 2)
    for (long l = 0; l < half; l++) partial[l] += partial[l + half];
  return partial[0];
}

struct alignas(64) Block {
  float values[BLOCK];
};

// A row of logits as whole blocks: what lies beyond its end reads as -infinity.
struct Row {
  const float* logits;
  long size, num_blocks, last;  // last: where the last block begins
  Block end;

  Row(const float* logits, long size)
      : logits(logits), size(size), num_blocks((size + BLOCK - 1) / BLOCK), last((num_blocks - 1) * BLOCK) {
    std::fill(std::copy(logits + last, logits + size, end.values), end.values + BLOCK, -INF);
  }
  const float* at(long i) const { return i < last ? logits + i : end.values + (i - last); }
};

struct Best {
  float value;  // NaN if any logit is
  long id;      // the lowest of equals
};

// The largest logit. Fills column_best: a block is 16 lines of WIDTH logits, and entry b * WIDTH + c is the
// largest of column c in block b. It tells later passes which blocks hold nothing of interest.
static Best find_best(const Row& row, std::vector<float>& column_best) {
  constexpr long PARTS = WIDTH / LANES;
  column_best.resize(row.num_blocks * WIDTH);
  Best best{-INF, 0};
  long best_block = 0;
  IntVec magnitude = {};  // as integers, magnitudes order like floats, and NaN is above infinity
  for (long b = 0; b < row.num_blocks; b++) {
    const float* block = row.at(b * BLOCK);
    Vec largest[PARTS];
    for (long p = 0; p < PARTS; p++) largest[p] = broadcast(-INF);
    for (long i = 0; i < BLOCK; i += WIDTH)
#pragma GCC unroll 4
      for (long p = 0; p < PARTS; p++) {
        const Vec v = load(block + i + p * LANES);
        const IntVec bits = reinterpret_cast<IntVec>(v) & 0x7fffffff;
        largest[p] = larger(v, largest[p]);
        magnitude = bits > magnitude ? bits : magnitude;
      }
    float* columns = &column_best[b * WIDTH];
    for (long p = 0; p < PARTS; p++) store(columns + p * LANES, largest[p]);
    const float block_best = *std::max_element(columns, columns + WIDTH);
    if (block_best > best.value) best.value = block_best, best_block = b;
  }
  const float* block = row.at(best_block * BLOCK);
  best.id = best_block * BLOCK + (std::find(block, block + BLOCK, best.value) - block);
  for (int l = 0; l < LANES; l++)
    if (magnitude[l] > (int32_t)bits_of(INF)) best.value = NAN;
  return best;
}

// Integers in the order of floats: of two floats, the larger has the larger key.
static NANO_INLINE int64_t key_of(float x) {
  const int32_t bits = (int32_t)bits_of(x);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

static NANO_INLINE float float_of_key(int64_t key) {
  const int32_t bits = (int32_t)key;
  return float_of((uint32_t)(bits < 0 ? bits ^ 0x7fffffff : bits));
}

// The k-th largest of `count` values, a multiple of LANES; -infinity if there are fewer than k above it.
static float kth_largest(const float* values, long count, long k) {
  // At least k values reach `low`, fewer reach `high`.
  int64_t low = key_of(-INF), high = key_of(INF) + 1;
  while (high - low > 1) {
    const int64_t middle = (low + high) >> 1;
    const Vec cut = broadcast(float_of_key(middle));
    IntVec reached = {};
    for (long i = 0; i < count; i += LANES) reached -= load(values + i) >= cut;
    long total = 0;
    for (int l = 0; l < LANES; l++) total += reached[l];
    (total >= k ? low : high) = middle;
  }
  return float_of_key(low);
}

// The tokens whose logit is at least `cut`, in rising order.
static void collect(const Row& row, const std::vector<float>& column_best, float cut,
                    std::vector<int32_t>& ids) {
  ids.clear();
  const Vec cuts = broadcast(cut);
  for (long b = 0; b < row.num_blocks; b++) {
    const float* columns = &column_best[b * WIDTH];
    if (*std::max_element(columns, columns + WIDTH) < cut) continue;
    const float* block = row.at(b * BLOCK);
    for (long i = 0; i < BLOCK; i += LANES)
      for (uint32_t mask = at_least(load(block + i), cuts); mask; mask &= mask - 1)
        ids.push_back((int32_t)(b * BLOCK + i + __builtin_ctz(mask)));
  }
  while (!ids.empty() && ids.back() >= row.size) ids.pop_back();  // a cut of -infinity takes the end along
}

// Few tokens that hold the k best, and all that tie with the last of those: k columns have a best logit
// this large, so at least k logits have.
static void collect_best(const Row& row, const std::vector<float>& column_best, long k,
                         std::vector<int32_t>& ids) {
  const long num_columns = (long)column_best.size();
  collect(row, column_best, k < num_columns ? kth_largest(column_best.data(), num_columns, k) : -INF, ids);
}

}  // namespace nano_sampling
