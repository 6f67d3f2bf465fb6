// Weights that are stored as bfloat16, multiplied as the floats they are.
//
// A word is two of them that belong to neighbouring inputs: a load gives two vectors of floats, by a shift
// and by a mask.
#pragma once

#include "layers/linear_op.h"

namespace nano_linear {

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

}  // namespace nano_linear
