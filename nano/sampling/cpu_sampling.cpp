// Sampling on CPU: rows of logits -> tokens, and their log probabilities. One task per row.
//
// What a row gives depends on nothing but the row: sums go through 32 partial sums per block of 512 tokens,
// collected in float64, at any vector width and on any thread. Maxima, counts and the winner of a race do
// not depend on an order; of equals the lowest token id wins.
//
// Nothing is sorted and nothing is scattered. A cut (the k-th largest logit, the weight at which top_p is
// reached) is found by bisection over the bits of a float: count, or add up, what is at least as large. Each
// such pass is a few vector operations per sixteen tokens, and after a few of them little is left to look at.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "math.h"
#include "native/tensor.h"
#include "threads.h"
#include "vector.h"

#if defined(__AVX__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define NANO_AVX512  // vectors are of 16 floats
#endif

namespace {

typedef double DoubleVec __attribute__((vector_size(8 * LANES)));

constexpr long WIDTH = 32;   // partial sums, whatever the vectors are
constexpr long BLOCK = 512;  // tokens added up in float32 before the sum moves on to float64
constexpr float INF = std::numeric_limits<float>::infinity();

// ---- vectors

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

// ---- rows

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

// Buffers of one thread, as long as its longest row so far.
struct Scratch {
  std::vector<Block> scaled, weights, spare;
  std::vector<float> column_best;  // per block, the largest of each column: see find_best
  std::vector<int32_t> ids;
  std::vector<float> values;
  std::vector<uint64_t> order;
  std::vector<int32_t> token_state;  // all zero between rows

  static float* blocks(std::vector<Block>& buffer, long num_blocks) {
    if ((long)buffer.size() < num_blocks) buffer.resize(num_blocks);
    return buffer[0].values;
  }
};

thread_local Scratch scratch;

struct Best {
  float value;  // NaN if any logit is
  long id;      // the lowest of equals
};

// The largest logit. Fills column_best: a block is 16 lines of WIDTH logits, and entry b * WIDTH + c is the
// largest of column c in block b. It tells later passes which blocks hold nothing of interest.
Best find_best(const Row& row, std::vector<float>& column_best) {
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
        largest[p] = v > largest[p] ? v : largest[p];
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
float kth_largest(const float* values, long count, long k) {
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
void collect(const Row& row, const std::vector<float>& column_best, float cut, std::vector<int32_t>& ids) {
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
void collect_best(const Row& row, const std::vector<float>& column_best, long k, std::vector<int32_t>& ids) {
  const long num_columns = (long)column_best.size();
  collect(row, column_best, k < num_columns ? kth_largest(column_best.data(), num_columns, k) : -INF, ids);
}

// The k-th largest logit.
float top_k_cut(const Row& row, const std::vector<float>& column_best, long k) {
  std::vector<int32_t>& ids = scratch.ids;
  std::vector<float>& values = scratch.values;
  collect_best(row, column_best, k, ids);
  values.assign((ids.size() + LANES - 1) / LANES * LANES, -INF);
  for (size_t i = 0; i < ids.size(); i++) values[i] = *row.at(ids[i]);
  return kth_largest(values.data(), (long)values.size(), k);
}

// ---- top-p

// Sum of the weights that are at least `cut`.
static NANO_INLINE double mass_from(const float* weights, long num_blocks, float cut) {
  const Vec cuts = broadcast(cut);
  return ordered_sum(num_blocks, [=](long i) {
    const Vec w = load(weights + i);
    return w >= cuts ? w : Vec{};
  });
}

// Copy the weights in [low, high) to `kept`, which may be `weights`: what is written was read before. Returns
// the blocks they fill.
long keep_between(const float* weights, long num_blocks, float low, float high, float* kept) {
  long num_kept = 0;
  const Vec lows = broadcast(low), highs = broadcast(high);
  for (long i = 0; i < num_blocks * BLOCK; i += LANES) {
    const Vec w = load(weights + i);
    num_kept += store_some(kept + num_kept, w, at_least(w, lows) & ~at_least(w, highs));
  }
  const long kept_blocks = (num_kept + BLOCK - 1) / BLOCK;
  std::fill(kept + num_kept, kept + kept_blocks * BLOCK, 0.0f);
  return kept_blocks;
}

// The smallest weight in the smallest set of largest weights that holds `top_p` of the mass: the largest
// cut from which on the mass still reaches the target. weights: in [0, 1], the largest is 1. spare: as long.
float top_p_cut(const float* weights, long num_blocks, double top_p, float* spare) {
  constexpr int PASSES = 4;  // between two copies of what is left
  constexpr float LEAST = std::numeric_limits<float>::min();
  const double total = mass_from(weights, num_blocks, float_of(1)), target = top_p * total;
  // All tokens below (1 - top_p) of the average hold too little to matter; half of that is on the safe side.
  const double negligible = 0.5 * (1.0 - top_p) * total / (double)(num_blocks * BLOCK);
  uint32_t low = bits_of(std::max((float)negligible, LEAST)), high = bits_of(1.0f) + 1;
  double above = 0.0;  // mass of the weights that were left behind, all of them over those still here
  while (high - low > 1) {
    num_blocks = keep_between(weights, num_blocks, float_of(low), float_of(high), spare);
    weights = spare;
    double above_high = above;
    for (int pass = 0; pass < PASSES && high - low > 1; pass++) {
      const uint32_t middle = low + (high - low) / 2;
      const double mass = above + mass_from(weights, num_blocks, float_of(middle));
      if (mass >= target) {
        low = middle;
      } else {
        high = middle;
        above_high = mass;
      }
    }
    above = above_high;
  }
  return float_of(low);
}

// ---- noise: nano/sampling/noise.py in vectors

struct NoiseKey {
  uint32_t first, second;
};

NoiseKey noise_key(int64_t seed, int64_t position) {
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
long race(const float* scaled, long num_blocks, NoiseKey key, long favourite) {
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

// ---- one row

struct Draw {
  float temperature;  // 0 is greedy
  double top_p, min_p;
  long top_k;  // 0 is off
  NoiseKey key;
};

// Scaled by the temperature, the best one 0, and -infinity where truncation excludes the token.
void scale_and_truncate(const Row& row, const Draw& draw, float best, float* scaled) {
  const Vec zero = broadcast(best), temperature = broadcast(draw.temperature), banned = broadcast(-INF);
  float cut = draw.min_p > 0 ? (float)std::log(draw.min_p) : -INF;
  if (draw.top_k > 0 && draw.top_k < row.size)
    cut = std::max(cut, (top_k_cut(row, scratch.column_best, draw.top_k) - best) / draw.temperature);
  const Vec cuts = broadcast(cut);
  for (long i = 0; i < row.num_blocks * BLOCK; i += LANES) {
    const Vec value = (load(row.at(i)) - zero) / temperature;
    store(scaled + i, value >= cuts ? value : banned);
  }
  if (draw.top_p >= 1) return;
  const Vec no_weight = broadcast(-104.0f);  // e^x is zero below
  float* weights = Scratch::blocks(scratch.weights, row.num_blocks);
  float* spare = Scratch::blocks(scratch.spare, row.num_blocks);
  for (long i = 0; i < row.num_blocks * BLOCK; i += LANES) {
    const Vec value = load(scaled + i);
    store(weights + i, at_least(value, no_weight) ? exponential(value) : Vec{});
  }
  const Vec lightest = broadcast(top_p_cut(weights, row.num_blocks, draw.top_p, spare));
  for (long i = 0; i < row.num_blocks * BLOCK; i += LANES)
    store(scaled + i, load(weights + i) >= lightest ? load(scaled + i) : banned);
}

// The token, or -1 if the best logit is not finite. processed: if not null, the logits it was drawn from.
long sample_row(const float* logits, long size, const Draw& draw, float* processed) {
  const Row row(logits, size);
  const Best best = find_best(row, scratch.column_best);
  if (!std::isfinite(best.value)) return -1;
  if (draw.temperature == 0) {
    if (processed) std::copy(logits, logits + size, processed);
    return best.id;
  }
  float* scaled = Scratch::blocks(scratch.scaled, row.num_blocks);
  scale_and_truncate(row, draw, best.value, scaled);
  if (processed) std::copy(scaled, scaled + size, processed);
  return race(scaled, row.num_blocks, draw.key, best.id);
}

// Of one row: the token's log probability and rank, then the `num_top` best in falling order.
void row_logprobs(const float* logits, long size, long token_id, long num_top, int64_t* ids, float* logprobs,
                  int64_t* rank) {
  const Row row(logits, size);
  const float best = find_best(row, scratch.column_best).value;
  const Vec zero = broadcast(best);
  const double log_sum =
      std::log(ordered_sum(row.num_blocks, [&](long i) { return exponential(load(row.at(i)) - zero); }));
  auto logprob = [&](long id) { return (float)((double)logits[id] - (double)best - log_sum); };

  const Vec chosen = broadcast(logits[token_id]);
  IntVec above = {};
  for (long i = 0; i < row.num_blocks * BLOCK; i += LANES) above -= load(row.at(i)) > chosen;
  *rank = 1;
  for (int l = 0; l < LANES; l++) *rank += above[l];
  *ids++ = token_id;
  *logprobs++ = logprob(token_id);

  std::vector<int32_t>& found = scratch.ids;
  collect_best(row, scratch.column_best, num_top, found);
  if ((long)found.size() < num_top) {  // NaN is not at least anything
    found.resize(size);
    std::iota(found.begin(), found.end(), 0);
  }
  // One number per token that orders as (falling logit, rising id); adding zero makes -0 and 0 equal.
  std::vector<uint64_t>& order = scratch.order;
  order.clear();
  for (int32_t id : found)
    order.push_back((uint64_t)(INT32_MAX - key_of(logits[id] + 0.0f)) << 32 | (uint32_t)id);
  std::partial_sort(order.begin(), order.begin() + num_top, order.end());
  for (long i = 0; i < num_top; i++) {
    ids[i] = (int64_t)(order[i] & 0xffffffffu);
    logprobs[i] = logprob(ids[i]);
  }
}

// Repetition penalty of tokens in prompt and output, frequency and presence penalties of those in the output.
// state: one zero per token of the vocabulary, left as zeros.
void penalise_row(float* logits, long size, const int32_t* known, long num_prompt, long num_known,
                  const double* penalties, std::vector<int32_t>& state) {
  const float repetition = (float)penalties[0];
  const double frequency = penalties[1], presence = penalties[2];
  if ((long)state.size() < size) state.resize(size);
  const auto is_token = [=](int32_t id) { return 0 <= id && id < size; };
  for (long j = 0; j < num_known; j++)  // bit 0: seen; above it: how often in the output
    if (is_token(known[j])) state[known[j]] = (state[known[j]] | 1) + (j < num_prompt ? 0 : 2);
  for (long j = 0; j < num_known; j++) {
    if (!is_token(known[j]) || !state[known[j]]) continue;
    const int32_t count = std::exchange(state[known[j]], 0) >> 1;
    float& logit = logits[known[j]];
    logit = logit > 0 ? logit / repetition : logit * repetition;
    if (count) logit -= (float)(frequency * count + presence);
  }
}

// ---- ops

void check_logits(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1,
                  "logits must be [L, V] with dense rows");
}

template <class T>
const T* dense(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.is_contiguous(), "tables and indices must be contiguous");
  return tensor.const_data_ptr<T>();
}

// tokens [L] int64; -1 where the best logit is not finite. logits: [L, V]. row: [L] int64, into the tables
// draws [R, 4] float64 (temperature, top_p, min_p, top_k) and seeds [R] int64. position: [L] int64.
// processed: [L, V], filled with what each token was drawn from, but for rows that give -1.
Tensor sample_rows(const Tensor& logits, const Tensor& row, const Tensor& position, const Tensor& draws,
                   const Tensor& seeds, const std::optional<Tensor>& processed) {
  check_logits(logits);
  const long num_rows = logits.size(0), size = logits.size(1), stride = logits.stride(0);
  Tensor tokens = torch::stable::new_empty(row, {num_rows});
  const float* x = logits.const_data_ptr<float>();
  const int64_t *rows = dense<int64_t>(row), *positions = dense<int64_t>(position);
  const int64_t* seed_of = dense<int64_t>(seeds);
  const double* table = dense<double>(draws);
  float* drawn_from = processed ? processed->mutable_data_ptr<float>() : nullptr;
  int64_t* token = tokens.mutable_data_ptr<int64_t>();
  parallel_for(num_rows, [&](long i) {
    const double* params = table + rows[i] * 4;
    const Draw draw{(float)params[0], params[1], params[2], (long)params[3],
                    noise_key(seed_of[rows[i]], positions[i])};
    token[i] = sample_row(x + i * stride, size, draw, drawn_from ? drawn_from + i * size : nullptr);
  });
  return tokens;
}

// Of the rows `index` [N] int64 of logits [L, V]: token ids and log probabilities [N, 1 + num_top], the
// given token first, and the given tokens' ranks [N]. num_top is at most V.
std::tuple<Tensor, Tensor, Tensor> gather_logprobs(const Tensor& logits, const Tensor& index,
                                                   const Tensor& token_ids, int64_t num_top) {
  check_logits(logits);
  const long num_rows = index.size(0), size = logits.size(1), stride = logits.stride(0);
  STD_TORCH_CHECK(num_top >= 0 && num_top <= size, "num_top must be in [0, V]");
  Tensor ids = torch::stable::new_empty(index, {num_rows, 1 + num_top});
  Tensor values = empty_floats({num_rows, 1 + num_top});
  Tensor ranks = torch::stable::new_empty(index, {num_rows});
  const float* x = logits.const_data_ptr<float>();
  const int64_t *rows = dense<int64_t>(index), *tokens = dense<int64_t>(token_ids);
  for (long i = 0; i < num_rows; i++)
    STD_TORCH_CHECK(0 <= tokens[i] && tokens[i] < size, "token ", tokens[i], " of a vocabulary of ", size);
  int64_t *id = ids.mutable_data_ptr<int64_t>(), *rank = ranks.mutable_data_ptr<int64_t>();
  float* value = values.mutable_data_ptr<float>();
  parallel_for(num_rows, [&](long i) {
    row_logprobs(x + rows[i] * stride, size, tokens[i], num_top, id + i * (1 + num_top),
                 value + i * (1 + num_top), rank + i);
  });
  return {ids, values, ranks};
}

// Penalises the rows `index` [N] of logits [L, V] in place, each for its first num_known [L] tokens.
// row: [L], into the tables token_ids [R, ...] int32, num_prompt [R] int32 and penalties [R, 3] float64
// (repetition, frequency, presence).
void penalise_rows(const Tensor& logits, const Tensor& index, const Tensor& row, const Tensor& num_known,
                   const Tensor& token_ids, const Tensor& num_prompt, const Tensor& penalties) {
  check_logits(logits);
  const long size = logits.size(1), stride = logits.stride(0), max_tokens = token_ids.size(1);
  float* x = logits.mutable_data_ptr<float>();
  const int64_t *picked = dense<int64_t>(index), *rows = dense<int64_t>(row);
  const int64_t* lengths = dense<int64_t>(num_known);
  const int32_t *tokens = dense<int32_t>(token_ids), *prompts = dense<int32_t>(num_prompt);
  const double* table = dense<double>(penalties);
  parallel_for(index.size(0), [&](long task) {
    const long i = picked[task], r = rows[i];
    penalise_row(x + i * stride, size, tokens + r * max_tokens, prompts[r], lengths[i], table + r * 3,
                 scratch.token_state);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(nano, m) {
  m.def("sample_rows(Tensor logits, Tensor row, Tensor position, Tensor draws, Tensor seeds, "
        "Tensor(a!)? processed) -> Tensor");
  m.def("gather_logprobs(Tensor logits, Tensor index, Tensor token_ids, int num_top) "
        "-> (Tensor, Tensor, Tensor)");
  m.def("penalise_rows(Tensor(a!) logits, Tensor index, Tensor row, Tensor num_known, Tensor token_ids, "
        "Tensor num_prompt, Tensor penalties) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(nano, CPU, m) {
  m.impl("sample_rows", TORCH_BOX(&sample_rows));
  m.impl("gather_logprobs", TORCH_BOX(&gather_logprobs));
  m.impl("penalise_rows", TORCH_BOX(&penalise_rows));
}
