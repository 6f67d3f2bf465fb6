// linear_op: the torch side of a linear op, the same for every weight format.
#pragma once

#include "layers/linear_kernel.h"
#include "native/op.h"

// x: [M, K] float32, its rows anywhere; bias: [N] float32. Returns [M, N].
template <class W>
static Tensor linear_op(const W& weights, const Tensor& x, const std::optional<Tensor>& bias,
                        int64_t num_outputs) {
  check(x.dim() == 2, "x has %ld dimensions, not 2", x.dim());
  const bool is_dense = x.stride(1) == 1 || x.size(1) == 1;
  const Tensor rows = is_dense ? x : contiguous(x);
  Tensor y = empty<float>({x.size(0), num_outputs});
  nano_linear::linear(weights, {rows.const_data_ptr<float>(), rows.stride(0),
                                bias ? bias->const_data_ptr<float>() : nullptr,
                                y.mutable_data_ptr<float>(), x.size(0), num_outputs, x.size(1)});
  return y;
}
