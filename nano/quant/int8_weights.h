// Int8Weights: w[n, k] = q * scale with q in -128 .. 127 and the scale of its group.
//
// Panels of 64 outputs, [N / 64][K / 4][64] words of four quants; scales [N / 64][groups][64].
#pragma once

#include "layers/linear_kernel.h"
#include "native/tensor.h"
#include "quant/scales.h"

template <class Scale>
struct Int8Weights {
  static constexpr int STEP = 4;

  const uint32_t* words;
  const Scale* scales;
  long num_words, num_groups, group_size;  // of one output

  struct Column {
    const uint32_t* words;  // of input 0
    Vec scale;
  };

  NANO_INLINE Column column(long output, long k) const {
    const long panel = output / nano_linear::PANEL, lane = output % nano_linear::PANEL;
    return {words + panel * num_words * nano_linear::PANEL + lane,
            load_scales(scales + (panel * num_groups + k / group_size) * nano_linear::PANEL + lane)};
  }

  NANO_INLINE long run_end(long k) const { return (k / group_size + 1) * group_size; }

  static NANO_INLINE void decode(const Column& column, long k, Vec (&w)[STEP]) {
    const uint32_t* at = column.words + k / STEP * nano_linear::PANEL;
    WordVec word;
    std::memcpy(&word, at, sizeof word);
#pragma GCC unroll 4
    for (int b = 0; b < 4; b++)
      w[b] = __builtin_convertvector((IntVec)(word << (24 - 8 * b)) >> 24, Vec) * column.scale;
  }
};

// packed [N / 64][K / 4][64][4] int8; scales [N / 64][groups][64] float16 or float32.
template <class Scale>
Int8Weights<Scale> int8_weights(const Tensor& packed, const Tensor& scales, long group_size) {
  return {static_cast<const uint32_t*>(packed.const_data_ptr()),
          static_cast<const Scale*>(scales.const_data_ptr()), packed.size(1), scales.size(1), group_size};
}
