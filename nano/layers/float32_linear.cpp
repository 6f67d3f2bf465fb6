// nano::linear_float32: a linear layer whose weights are stored as they are.
#include "layers/linear_op.h"

using namespace nano_linear;

namespace {

struct Float32 {
  static constexpr int STEP = 1;
  struct Column {
    const uint32_t* words;
  };
  const uint32_t* packed;
  long K;

  Float32(const Tensor& w, long inputs)
      : packed(static_cast<const uint32_t*>(w.const_data_ptr())), K(inputs) {}

  NANO_INLINE Column column(long output, long) const {
    return {packed + output / PANEL * K * PANEL + output % PANEL};
  }
  NANO_INLINE long run_end(long) const { return K; }
  static NANO_INLINE void decode(const Column& column, long k, Vec (&w)[STEP]) {
    w[0] = reinterpret_cast<Vec>(load(column.words + k * PANEL));
  }
};

Tensor run(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t num_outputs) {
  return linear_op(Float32(packed, x.size(1)), x, bias, num_outputs);
}

}  // namespace

static const Ops ops{
    {"linear_float32(Tensor x, Tensor packed, Tensor? bias, int num_outputs) -> Tensor", op<&run>},
};
