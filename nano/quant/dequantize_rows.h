// dequantize_rows: rows of a packed matrix as floats, decoded by the very code that multiplies by them.
#pragma once

#include "layers/linear_kernel.h"
#include "native/tensor.h"

// ids: [T] int32 or int64, each below N. Returns [T, K].
template <class W>
static Tensor dequantize_rows(const W& weights, const Tensor& ids, long N, long K) {
  const Tensor dense = contiguous(ids);
  const void* data = dense.const_data_ptr();
  const bool is_wide = ids.element_size() == 8;
  const long T = ids.numel();
  std::vector<long> rows(T);
  for (long t = 0; t < T; t++) {
    rows[t] = is_wide ? static_cast<const int64_t*>(data)[t] : static_cast<const int32_t*>(data)[t];
    check(0 <= rows[t] && rows[t] < N, "row %ld of a matrix of %ld", rows[t], N);
  }
  Tensor result = empty<float>({T, K});
  float* out = result.mutable_data_ptr<float>();
  parallel_for(T, [&](long t) {
    const long lane = rows[t] % LANES;
    for (long k = 0, end; k < K; k = end) {
      end = std::min(weights.run_end(k), K);
      const typename W::Column column = weights.column(rows[t] - lane, k);
      for (; k < end; k += W::STEP) {
        Vec w[W::STEP];
        W::decode(column, k, w);
        for (long s = 0; s < std::min<long>(W::STEP, end - k); s++) out[t * K + k + s] = w[s][lane];
      }
    }
  });
  return result;
}
