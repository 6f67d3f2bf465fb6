// nano::linear_bfloat16: a linear layer whose weights are stored as bfloat16.
//
// A word is two of them that belong to neighbouring inputs: a load gives two vectors of floats, by a shift
// and by a mask.
#include "layers/linear_op.h"

using namespace nano_linear;

namespace {

struct BFloat16 {
  static constexpr int STEP = 2;
  struct Column {
    const uint32_t* words;
  };
  const uint32_t* packed;
  long K;

  BFloat16(const Tensor& w, long inputs)
      : packed(static_cast<const uint32_t*>(w.const_data_ptr())), K(inputs) {}

  NANO_INLINE Column column(long output, long) const {
    return {packed + output / PANEL * ((K + 1) / 2) * PANEL + output % PANEL};
  }
  NANO_INLINE long run_end(long) const { return K; }
  static NANO_INLINE void decode(const Column& column, long k, Vec (&w)[STEP]) {
    const WordVec words = load(column.words + k / STEP * PANEL);
    w[0] = reinterpret_cast<Vec>(words << 16);
    w[1] = reinterpret_cast<Vec>(words & 0xffff0000u);
  }
};

Tensor run(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t num_outputs) {
  return linear_op(BFloat16(packed, x.size(1)), x, bias, num_outputs);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(nano, m) {
  m.def("linear_bfloat16(Tensor x, Tensor packed, Tensor? bias, int num_outputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(nano, CPU, m) { m.impl("linear_bfloat16", TORCH_BOX(&run)); }
