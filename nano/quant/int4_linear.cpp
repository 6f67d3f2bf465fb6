// Linear layers and embeddings on 4-bit weights, in float32 arithmetic: the bits of the dequantised matrix.
#include "layers/linear_op.h"
#include "quant/dequantize_rows.h"
#include "quant/int4_weights.h"

namespace {

Tensor linear_int4(const Tensor& x, const Tensor& packed, const Tensor& scales,
                   const std::optional<Tensor>& bias, int64_t group_size, int64_t num_outputs) {
  return linear_op(Int4Weights(packed, scales, group_size), x, bias, num_outputs);
}

Tensor dequantize_rows_int4(const Tensor& ids, const Tensor& packed, const Tensor& scales,
                            int64_t group_size, int64_t num_outputs, int64_t num_inputs) {
  return dequantize_rows(Int4Weights(packed, scales, group_size), ids, num_outputs, num_inputs);
}

}  // namespace

static const Ops ops{
    {"linear_int4(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int group_size, "
     "int num_outputs) -> Tensor",
     op<&linear_int4>},
    {"dequantize_rows_int4(Tensor ids, Tensor packed, Tensor scales, int group_size, "
     "int num_outputs, int num_inputs) -> Tensor",
     op<&dequantize_rows_int4>},
};
