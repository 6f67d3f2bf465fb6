// Int8Weights: w[n, k] = q * scale with q in -128 .. 127 and the scale of its group.
//
// Panels of 64 outputs, [N / 64][K / 4][64] words of four quants; scales [N / 64][groups][64], float16 or
// float32.
#pragma once

#include "layers/linear_kernel.h"
#include "quant/scales.h"

struct Int8Weights {
  static constexpr int STEP = 4;

  const uint32_t* words;
  Scales scales;
  long num_words, num_groups, group_size;  // of one output

  Int8Weights(const Tensor& packed, const Tensor& scales, long group_size)
      : words(static_cast<const uint32_t*>(packed.const_data_ptr())),
        scales(scales),
        num_words(packed.size(1)),
        num_groups(scales.size(1)),
        group_size(group_size) {}

  struct Column {
    const uint32_t* words;
    Vec scale;
  };

  NANO_INLINE Column column(long output, long k) const {
    const long panel = output / nano_linear::PANEL, lane = output % nano_linear::PANEL;
    return {words + panel * num_words * nano_linear::PANEL + lane,
            scales.at((panel * num_groups + k / group_size) * nano_linear::PANEL + lane)};
  }

  NANO_INLINE long run_end(long k) const { return (k / group_size + 1) * group_size; }

  static NANO_INLINE void decode(const Column& column, long k, Vec (&w)[STEP]) {
    const WordVec word = load(column.words + k / STEP * nano_linear::PANEL);
#pragma GCC unroll 4
    for (int b = 0; b < 4; b++)
      w[b] = __builtin_convertvector((IntVec)(word << (24 - 8 * b)) >> 24, Vec) * column.scale;
  }
};
