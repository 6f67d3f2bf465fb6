// nano::linear_bfloat16: a linear layer whose weights are stored as bfloat16.
#include "layers/bfloat16_weights.h"

using namespace nano_linear;

namespace {

Tensor run(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t num_outputs) {
  return linear_op(BFloat16(packed, x.size(1)), x, bias, num_outputs);
}

}  // namespace

static const Ops ops{
    {"linear_bfloat16(Tensor x, Tensor packed, Tensor? bias, int num_outputs) -> Tensor", op<&run>},
};
