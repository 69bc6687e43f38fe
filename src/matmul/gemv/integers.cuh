// x as integers, so that MMAs with packed integers need no other numbers: a group is a step times integers of 15 bits, which is
// finer than 16-bit numbers next to the largest of the group. An integer is two digits of a byte each.
#pragma once

namespace mlx_cuda {

// 8 adjacent values: a byte of each, in the order of an MMA whose other operand has the values of packed words.
struct IntegerPiece {
  uint2 upper;
  uint2 lower;
  float2 group;  // the step, and the sum of the group's values
};

// The upper and the lower digits of four integers of 16 bits, two in each word. The lower ones are 7 bits, less 64.
__device__ inline unsigned upper_digits(unsigned first, unsigned second) {
  return __byte_perm(first << 1, second << 1, 0x7531);
}
__device__ inline unsigned lower_digits(unsigned first, unsigned second) {
  return ((__byte_perm(first, second, 0x6420) | 0x80808080u) - 0x40404040u) ^ 0x80808080u;
}

// By whole warps, of which `Lanes` adjacent ones have a group. Words of 4-bit values have the even ones first.
template <int Bits, int Lanes>
__device__ inline IntegerPiece to_integers(const float (&values)[8]) {
  float largest = 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    largest = fmaxf(largest, fmaxf(fabsf(values[j]), fabsf(values[j + 1])));  // NaN is in the sum
    sum += values[j] + values[j + 1];
  }
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
    sum += __shfl_xor_sync(~0u, sum, offset);
  }
  constexpr float most = 127 * 128;
  const float inverse = largest > 1e-30f ? __fdividef(most, largest) : 0.0f;
  constexpr float round = 12582912.0f + 64.0f;  // whose last bit is 1, plus half a digit
  const auto pair = [&](int i, int j) {
    return __byte_perm(__float_as_uint(fmaf(values[i], inverse, round)), __float_as_uint(fmaf(values[j], inverse, round)), 0x5410);
  };
  constexpr int apart = Bits == 4 ? 2 : 1;
  constexpr int other = Bits == 4 ? 1 : 4;
  const unsigned low[2] = {pair(0, apart), pair(2 * apart, 3 * apart)};
  const unsigned high[2] = {pair(other, other + apart), pair(other + 2 * apart, other + 3 * apart)};
  return {
      make_uint2(upper_digits(low[0], low[1]), upper_digits(high[0], high[1])),
      make_uint2(lower_digits(low[0], low[1]), lower_digits(high[0], high[1])), make_float2(largest * (1.0f / most), sum)};
}

}  // namespace mlx_cuda
