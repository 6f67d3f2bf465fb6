#define NANO_LANES8  // until rewritten for any width
// y[M, N] = x[M, K] @ w[N, K]^T + bias, for any number of rows M, with packed weights.
//
// The order of the sum is the point: each output is one chain of fused multiply-adds over
// k = 0 .. K-1, whatever M is, however rows and columns are cut, and on any number of threads. A row's
// result is therefore the same bits alone or among thousands.
//
// Weights are packed in panels of 16 columns, [N / 16][K][16], so that one step of k reads 16
// neighbours. bfloat16 panels pair column i with i + 8: one load gives two vectors of floats.
#include <algorithm>

#include "vector.h"

namespace {

constexpr long PANEL = 16;
constexpr long HALVES = PANEL / LANES;
constexpr long PREFETCH_BYTES = 4096;
constexpr long MAX_ROWS = 6;       // 6 rows x 2 halves: twelve accumulators, latency is hidden
constexpr long WIDE_PANELS = 3;    // one or two rows alone would leave the multipliers idle
constexpr long K_CHUNK = 512;      // with many rows, a chunk of a panel stays in the first-level cache
constexpr long MANY_ROWS = 12;

struct Float32 {
  using Stored = float;
  static void load_pair(const float* p, Vec& low, Vec& high) {
    low = load(p);
    high = load(p + LANES);
  }
};

struct BFloat16 {
  using Stored = uint16_t;
  static void load_pair(const uint16_t* p, Vec& low, Vec& high) {
    WordVec words;
    std::memcpy(&words, p, sizeof words);
    low = reinterpret_cast<Vec>(words << 16);
    high = reinterpret_cast<Vec>(words & 0xffff0000u);
  }
};

// ROWS rows times PANELS panels, k_count steps of k, onto what y holds (or zero at the start).
template <class W, int ROWS, int PANELS>
inline void tile(const float* x, long x_stride, const typename W::Stored* w, long panel_stride,
                 long k_count, float* y, long y_stride, bool is_first) {
  Vec low[PANELS][ROWS], high[PANELS][ROWS];
#pragma GCC unroll 8
  for (int j = 0; j < PANELS; j++)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      float* at = y + r * y_stride + j * PANEL;
      low[j][r] = is_first ? Vec{} : load(at);
      high[j][r] = is_first ? Vec{} : load(at + LANES);
    }
  for (long k = 0; k < k_count; k++)
#pragma GCC unroll 8
    for (int j = 0; j < PANELS; j++) {
      const typename W::Stored* at = w + j * panel_stride + k * PANEL;
      __builtin_prefetch(reinterpret_cast<const char*>(at) + PREFETCH_BYTES);
      Vec w_low, w_high;
      W::load_pair(at, w_low, w_high);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        Vec factor = broadcast(x[r * x_stride + k]);
        low[j][r] += factor * w_low;  // contracted to a fused multiply-add, here as everywhere
        high[j][r] += factor * w_high;
      }
    }
#pragma GCC unroll 8
  for (int j = 0; j < PANELS; j++)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      float* at = y + r * y_stride + j * PANEL;
      store(at, low[j][r]);
      store(at + LANES, high[j][r]);
    }
}

// ROWS rows over the panels [first, last).
template <class W, int ROWS, int PANELS>
inline void rows_over_panels(const float* x, const typename W::Stored* w, float* y, long first,
                             long last, long K, long k_start, long k_count, long y_stride) {
  const long panel_stride = K * PANEL;
  const typename W::Stored* from = w + k_start * PANEL;
  long panel = first;
  for (; panel + PANELS <= last; panel += PANELS)
    tile<W, ROWS, PANELS>(x + k_start, K, from + panel * panel_stride, panel_stride, k_count,
                          y + panel * PANEL, y_stride, k_start == 0);
  for (; panel < last; panel++)
    tile<W, ROWS, 1>(x + k_start, K, from + panel * panel_stride, panel_stride, k_count,
                     y + panel * PANEL, y_stride, k_start == 0);
}

template <class W>
void block(const float* x, const typename W::Stored* w, float* y, long M, long first, long last,
           long K, long k_start, long k_count, long y_stride) {
  for (long m = 0; m < M;) {
    // Rows are dealt out evenly: 7 are 4 + 3 and 8 are 4 + 4, never 6 and a few.
    const long left = M - m, parts = (left + MAX_ROWS - 1) / MAX_ROWS;
    const long rows = (left + parts - 1) / parts;
    const float* from = x + m * K;
    float* to = y + m * y_stride;
#define NANO_ROWS(n, panels) \
  case n: \
    rows_over_panels<W, n, panels>(from, w, to, first, last, K, k_start, k_count, y_stride); \
    break;
    switch (rows) {
      NANO_ROWS(1, WIDE_PANELS)
      NANO_ROWS(2, WIDE_PANELS)
      NANO_ROWS(3, 1)
      NANO_ROWS(4, 1)
      NANO_ROWS(5, 1)
      NANO_ROWS(6, 1)
    }
#undef NANO_ROWS
    m += rows;
  }
}

template <class W>
void linear(const float* x, const typename W::Stored* w, const float* bias, float* y, long M,
            long num_panels, long K) {
  const long y_stride = num_panels * PANEL;
  const long task = WIDE_PANELS;  // panels that a thread takes at a time
  const long k_chunk = M > MANY_ROWS ? K_CHUNK : K;
#pragma omp parallel for schedule(dynamic, 2)
  for (long first = 0; first < num_panels; first += task) {
    const long last = std::min(first + task, num_panels);
    for (long k = 0; k < K; k += k_chunk)
      block<W>(x, w, y, M, first, last, K, k, std::min(k_chunk, K - k), y_stride);
    if (bias)
      for (long m = 0; m < M; m++)
        for (long n = first * PANEL; n < last * PANEL; n += LANES) {
          float* at = y + m * y_stride + n;
          store(at, load(at) + load(bias + n));
        }
  }
}

}  // namespace

extern "C" {

// x [M, K]; w [num_panels][K][16]; bias [num_panels * 16] or null; y [M, num_panels * 16].
void nano_linear_float32(const float* x, const float* w, const float* bias, float* y, long M,
                         long num_panels, long K) {
  linear<Float32>(x, w, bias, y, M, num_panels, K);
}

void nano_linear_bfloat16(const float* x, const uint16_t* w, const float* bias, float* y, long M,
                          long num_panels, long K) {
  linear<BFloat16>(x, w, bias, y, M, num_panels, K);
}
}
