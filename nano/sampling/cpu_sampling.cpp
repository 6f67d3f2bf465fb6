// Sampling on CPU: rows of logits -> tokens, and their log probabilities. One task per row.
//
// What a row gives depends on nothing but the row (see logits_rows.h), at any vector width and on any thread.
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "native/op.h"
#include "native/threads.h"
#include "sampling/logits_cuts.h"
#include "sampling/noise_race.h"

namespace {

using namespace nano_sampling;

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
    cut = std::max(cut, (top_k_cut(row, scratch.column_best, draw.top_k, scratch.ids, scratch.values) - best) /
                            draw.temperature);
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
  check(logits.dim() == 2 && logits.size(1) > 0 && logits.stride(1) == 1,
        "logits must be [L, V] with dense rows");
}

template <class T>
const T* dense(const Tensor& tensor) {
  check(tensor.is_contiguous(), "tables and indices must be contiguous");
  return tensor.const_data_ptr<T>();
}

// tokens [L] int64; -1 where the best logit is not finite. logits: [L, V]. row: [L] int64, into the tables
// draws [R, 4] float64 (temperature, top_p, min_p, top_k) and seeds [R] int64. position: [L] int64.
// processed: [L, V], filled with what each token was drawn from, but for rows that give -1.
Tensor sample_rows(const Tensor& logits, const Tensor& row, const Tensor& position, const Tensor& draws,
                   const Tensor& seeds, const std::optional<Tensor>& processed) {
  check_logits(logits);
  const long num_rows = logits.size(0), size = logits.size(1), stride = logits.stride(0);
  Tensor tokens = empty<int64_t>({num_rows});
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
std::array<Tensor, 3> gather_logprobs(const Tensor& logits, const Tensor& index, const Tensor& token_ids,
                                      int64_t num_top) {
  check_logits(logits);
  const long num_rows = index.size(0), size = logits.size(1), stride = logits.stride(0);
  check(num_top >= 0 && num_top <= size, "num_top must be in [0, V]");
  Tensor ids = empty<int64_t>({num_rows, 1 + num_top});
  Tensor values = empty<float>({num_rows, 1 + num_top});
  Tensor ranks = empty<int64_t>({num_rows});
  const float* x = logits.const_data_ptr<float>();
  const int64_t *rows = dense<int64_t>(index), *tokens = dense<int64_t>(token_ids);
  for (long i = 0; i < num_rows; i++)
    check(0 <= tokens[i] && tokens[i] < size, "token %ld of a vocabulary of %ld", tokens[i], size);
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

static const Ops ops{
    {"sample_rows(Tensor logits, Tensor row, Tensor position, Tensor draws, Tensor seeds, "
     "Tensor(a!)? processed) -> Tensor",
     op<&sample_rows>},
    {"gather_logprobs(Tensor logits, Tensor index, Tensor token_ids, int num_top) "
     "-> (Tensor, Tensor, Tensor)",
     op<&gather_logprobs>},
    {"penalise_rows(Tensor(a!) logits, Tensor index, Tensor row, Tensor num_known, "
     "Tensor token_ids, Tensor num_prompt, Tensor penalties) -> ()",
     op<&penalise_rows>},
};
