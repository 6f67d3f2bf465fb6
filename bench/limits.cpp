// What this machine can do at most, on the engine's own threads: bytes read and multiply-adds per second.
#include <atomic>
#include <chrono>

#include "native/op.h"
#include "native/threads.h"
#include "native/vector.h"

namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::atomic<float> sink;  // results go here, so that nothing is optimised away

void keep(Vec v) {
  float total = 0;
  for (int i = 0; i < LANES; i++) total += v[i];
  sink.store(total, std::memory_order_relaxed);
}

// Gigabytes per second of one pass over `data` (float32, contiguous).
double read_rate(const Tensor& data) {
  constexpr long PART = 1 << 16;  // floats per task
  const float* from = data.const_data_ptr<float>();
  const long parts = data.numel() / PART;
  const double start = seconds();
  parallel_for(parts, [&](long part) {
    const float* p = from + part * PART;
    Vec sums[8] = {};
    for (long i = 0; i < PART; i += 8 * LANES)
      for (int j = 0; j < 8; j++) sums[j] += load(p + i + j * LANES);
    keep((sums[0] + sums[1]) + (sums[2] + sums[3]) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
  });
  return parts * PART * 4 / (seconds() - start) / 1e9;
}

// GFLOP/s of float32 fused multiply-adds, by the one value in `factor`, that touch no memory.
double multiply_rate(const Tensor& factor, int64_t millions) {
  constexpr int CHAINS = 12;
  const long tasks = 64, rounds = millions * 1000000 / tasks / CHAINS;
  const Vec by = broadcast(*factor.const_data_ptr<float>());
  const double start = seconds();
  parallel_for(tasks, [&](long) {
    Vec sums[CHAINS];  // all different, or the compiler would compute one for all
    for (int j = 0; j < CHAINS; j++) sums[j] = broadcast(0.1f * j);
    for (long i = 0; i < rounds; i++)
#pragma GCC unroll 12
      for (int j = 0; j < CHAINS; j++) sums[j] = sums[j] * by + by;
    for (int j = 0; j < CHAINS; j++) keep(sums[j]);
  });
  return 2.0 * tasks * rounds * CHAINS * LANES / (seconds() - start) / 1e9;
}

}  // namespace

static const Ops ops{
    {"read_rate(Tensor data) -> float", op<&read_rate>},
    {"multiply_rate(Tensor factor, int millions) -> float", op<&multiply_rate>},
};
