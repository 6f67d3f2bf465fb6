// Int4Weights: w[n, k] = q * scale + offset with q in 0 .. 15 and the scale and offset of its group.
//
// Panels of 64 outputs, [N / 64][K / 8][64] words of eight quants: byte b of a word holds input b in its
// low four bits and input b + 4 in its high ones, so that two masks give four bytes each.
// Scales [N / 64][groups][2][64], float16 or float32: the scales of 64 outputs, then their offsets.
#pragma once

#include "layers/linear_kernel.h"
#include "quant/scales.h"

// The number that the low four bits of each word are.
static NANO_INLINE Vec low_digit(WordVec word) {
#if defined(NANO_AVX512)
  const Vec digits = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (Vec)_mm512_maskz_permutexvar_ps((__mmask16)-1, (__m512i)word, (__m512)digits);
#else
  return __builtin_convertvector((IntVec)(word & 15), Vec);
#endif
}

struct Int4Weights {
  static constexpr int STEP = 8;

  const uint32_t* words;
  Scales scales;
  long num_words, num_groups, group_size;  // of one output

  Int4Weights(const Tensor& packed, const Tensor& scales, long group_size)
      : words(static_cast<const uint32_t*>(packed.const_data_ptr())),
        scales(scales),
        num_words(packed.size(1)),
        num_groups(scales.size(1)),
        group_size(group_size) {}

  struct Column {
    const uint32_t* words;
    Vec scale, high_scale, offset;  // high_scale: for a digit times sixteen; exact, as no scale is denormal
  };

  NANO_INLINE Column column(long output, long k) const {
    const long panel = output / nano_linear::PANEL, lane = output % nano_linear::PANEL;
    const long at = (panel * num_groups + k / group_size) * 2 * nano_linear::PANEL + lane;
    const Vec scale = scales.at(at);
    return {words + panel * num_words * nano_linear::PANEL + lane, scale, scale * broadcast(0.0625f),
            scales.at(at + nano_linear::PANEL)};
  }

  NANO_INLINE long run_end(long k) const { return (k / group_size + 1) * group_size; }

  static NANO_INLINE void decode(const Column& column, long k, Vec (&w)[STEP]) {
    const WordVec word = load(column.words + k / STEP * nano_linear::PANEL);
#pragma GCC unroll 4
    for (int b = 0; b < 4; b++) {
      const WordVec byte = word >> (8 * b);
      w[b] = low_digit(byte) * column.scale + column.offset;
      w[b + 4] = __builtin_convertvector((IntVec)(byte & 0xf0), Vec) * column.high_scale + column.offset;
    }
  }
};
