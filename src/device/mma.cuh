// Fragments for tensor cores (device/ptx.cuh), and their accumulators.
#pragma once

#include "device/ptx.cuh"

namespace mlx_cuda {

__device__ inline unsigned pack(float low, float high, __half) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<unsigned*>(&pair);
}
__device__ inline unsigned pack(float low, float high, __nv_bfloat16) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<unsigned*>(&pair);
}

__device__ inline unsigned word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

__device__ inline float2 unpack(unsigned pair, __half) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}
__device__ inline float2 unpack(unsigned pair, __nv_bfloat16) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
}

// Lane c of a quad has word i of its own block of 16 bytes in words[i] of lane i.
__device__ inline uint4 gather_quad(unsigned (&words)[4]) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & bit) == 0) {
        const bool upper = c & bit;
        const unsigned got = __shfl_xor_sync(~0u, upper ? words[i] : words[i + bit], bit);
        words[i] = upper ? got : words[i];
        words[i + bit] = upper ? words[i + bit] : got;
      }
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace mlx_cuda
