// nano::rms_norm, nano::silu_and_mul: what a layer does to each row between its linear layers.
//
// A row's bits depend on the row alone: its sum of squares is 16 partial sums and a fixed tree at any
// vector width, and everything else is elementwise. Rows are dealt to threads only if there are many.
#include <algorithm>
#include <cmath>

#include "math.h"
#include "native/op.h"
#include "threads.h"
#include "vector.h"

namespace {

constexpr long PARTIAL_SUMS = 16;
constexpr long TASK_FLOATS = 1 << 14;  // a task of fewer takes less time than handing it over

// Run body(first, last) over ranges of rows of `width` floats.
template <class Body>
void for_rows(long num_rows, long width, Body body) {
  const long rows = std::max<long>(1, TASK_FLOATS / std::max<long>(1, width));
  parallel_for((num_rows + rows - 1) / rows,
               [&](long task) { body(task * rows, std::min((task + 1) * rows, num_rows)); });
}

float sum_of_squares(const float* x, long size) {
  constexpr long VECTORS = PARTIAL_SUMS / LANES;
  Vec partial[VECTORS] = {};
  long i = 0;
  for (; i + PARTIAL_SUMS <= size; i += PARTIAL_SUMS)
    for (long v = 0; v < VECTORS; v++) {
      const Vec at = load(x + i + v * LANES);
      partial[v] += at * at;
    }
  float sums[PARTIAL_SUMS];
  for (long v = 0; v < VECTORS; v++) store(sums + v * LANES, partial[v]);
  for (long j = 0; i < size; i++, j++) sums[j] += x[i] * x[i];
  for (long half = PARTIAL_SUMS / 2; half > 0; half /= 2)
    for (long j = 0; j < half; j++) sums[j] += sums[j + half];
  return sums[0];
}

// to = weight * (x / rms(x)): scaled first, then weighted, as in Hugging Face.
void norm_row(const float* x, const float* weight, float* to, long size, float eps) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, size) / (float)size + eps);
  long i = 0;
  for (; i + LANES <= size; i += LANES)
    store(to + i, load(weight + i) * (load(x + i) * broadcast(scale)));
  for (; i < size; i++) to[i] = weight[i] * (x[i] * scale);
}

// x: [..., size], at most two leading dimensions, rows anywhere.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const long dims = x.dim();
  check(dims == 2 || dims == 3, "rms_norm of %ld dimensions", dims);
  const long size = x.size(dims - 1), inner = dims == 3 ? x.size(1) : 1;
  check(weight.size(0) == size && weight.stride(0) == 1, "rms_norm takes a dense weight of %ld", size);
  const Tensor from = x.stride(dims - 1) == 1 ? x : contiguous(x);
  Tensor out = dims == 3 ? empty<float>({x.size(0), inner, size}) : empty<float>({x.size(0), size});
  const float *data = from.const_data_ptr<float>(), *weights = weight.const_data_ptr<float>();
  const long outer_stride = from.stride(0), inner_stride = dims == 3 ? from.stride(1) : 0;
  float* to = out.mutable_data_ptr<float>();
  for_rows(x.size(0) * inner, size, [&](long first, long last) {
    for (long row = first; row < last; row++)
      norm_row(data + row / inner * outer_stride + row % inner * inner_stride, weights, to + row * size,
               size, (float)eps);
  });
  return out;
}

// to = gate / (1 + e^-gate) * up
void silu_and_mul_row(const float* gate, const float* up, float* to, long size) {
  const auto product = [](Vec g, Vec u) { return g / (broadcast(1.0f) + exponential(-g)) * u; };
  long i = 0;
  for (; i + LANES <= size; i += LANES) store(to + i, product(load(gate + i), load(up + i)));
  if (i == size) return;
  float some[2][LANES] = {};
  std::copy(gate + i, gate + size, some[0]);
  std::copy(up + i, up + size, some[1]);
  const Vec last = product(load(some[0]), load(some[1]));
  std::memcpy(to + i, &last, (size - i) * sizeof(float));
}

// gate_up: [T, 2 I], its rows anywhere. Returns [T, I].
Tensor silu_and_mul(const Tensor& gate_up) {
  check(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "silu_and_mul takes [T, 2 I]");
  const Tensor from = gate_up.stride(1) == 1 ? gate_up : contiguous(gate_up);
  const long size = gate_up.size(1) / 2, stride = from.stride(0);
  Tensor out = empty<float>({gate_up.size(0), size});
  const float* data = from.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  for_rows(gate_up.size(0), size, [&](long first, long last) {
    for (long row = first; row < last; row++)
      silu_and_mul_row(data + row * stride, data + row * stride + size, to + row * size, size);
  });
  return out;
}

}  // namespace

static const Ops ops{
    {"rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", op<&rms_norm>},
    {"silu_and_mul(Tensor gate_up) -> Tensor", op<&silu_and_mul>},
};
