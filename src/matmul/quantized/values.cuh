// Packed values as 16-bit numbers in their order, bit-identical to mx.dequantize.
#pragma once

#include "matmul/quantized/unpack.cuh"

namespace mlx_cuda {

// Whether numbers of T hold every scale of the format.
template <typename Format, typename T>
inline constexpr bool kScalesFit = true;
template <>
inline constexpr bool kScalesFit<Mxfp4, __half> = false;
template <>
inline constexpr bool kScalesFit<Mxfp8, __half> = false;

// The scale of a group, and its bias.
template <typename Format, typename T>
struct GroupScale {
  unsigned scale;  // twice, as T, or as float32 where T does not hold it
  unsigned bias;   // twice

  __device__ void load(const void* scales, const void* biases, long long group) {
    if constexpr (Format::kBiased) {
      scale = __ldg(static_cast<const unsigned short*>(scales) + group);
      bias = __ldg(static_cast<const unsigned short*>(biases) + group);
    } else {
      scale = __ldg(static_cast<const unsigned char*>(scales) + group);
    }
  }

  // Not part of `load`, so that its loads may arrive later.
  __device__ void expand() {
    if constexpr (Format::kBiased) {
      scale *= 0x10001u;
      bias *= 0x10001u;
    } else {
      const float value = scale_from(static_cast<unsigned char>(scale), Format{});
      scale = kScalesFit<Format, T> ? pack(value, value, T{}) : __float_as_uint(value);
    }
  }
};

// Pairs of values that are `Apart` from each other, as `unpack` returns them, as pairs of adjacent values.
template <int Apart>
__device__ inline uint4 in_order(const unsigned (&pairs)[4]) {
  if constexpr (Apart == 1) {
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
    const uint4 low = make_uint4(
        __byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[0], pairs[1], 0x7632), __byte_perm(pairs[2], pairs[3], 0x5410),
        __byte_perm(pairs[2], pairs[3], 0x7632));
    return Apart == 2 ? low : make_uint4(low.x, low.z, low.y, low.w);
  }
}

template <typename Format, typename T>
__device__ inline uint4 rounded_values(uint2 piece, float scale) {
  float values[8];
  unpack<Format>(piece, values);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    values[i] *= scale;
  }
  return make_uint4(
      pack(values[0], values[1], T{}), pack(values[2], values[3], T{}), pack(values[4], values[5], T{}),
      pack(values[6], values[7], T{}));
}

// 8 values of a group in order.
template <typename Format, typename T>
__device__ inline uint4 values_in_order(uint2 piece, const GroupScale<Format, T>& group) {
  if constexpr (!kScalesFit<Format, T>) {
    return rounded_values<Format, T>(piece, __uint_as_float(group.scale));
  } else {
    unsigned pairs[4];
    if constexpr (Format::kBiased) {
      unpack<Format, T>(piece, pairs);
      scale_pairs<T>(pairs, group.scale, group.bias);
    } else {
      if constexpr (Format::kBits == 4) {
        unpack_fp4(piece.x, pairs, T{});
      } else {
        if (fp8_nans(piece.x) | fp8_nans(piece.y)) {
          return rounded_values<Format, T>(piece, unpack(group.scale, T{}).x);
        }
        unpack_fp8(piece.x, pairs[0], pairs[1], T{});
        unpack_fp8(piece.y, pairs[2], pairs[3], T{});
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // together with the scale this may be more than there are numbers for
          pairs[i] = as_bits(__hmul2(as_pair<T>(pairs[i]), as_pair<T>(0x7b807b80u)));  // 2^120
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pairs[i] = as_bits(__hmul2(as_pair<T>(pairs[i]), as_pair<T>(group.scale)));
      }
    }
    return in_order<kApart<Format>>(pairs);
  }
}

}  // namespace mlx_cuda
