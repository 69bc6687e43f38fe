// Vectors of 16-bit and 32-bit floats that move as one memory transaction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace mlx_cuda {

template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T value[N];
};

// Elements of T in the widest access of one thread (16 bytes).
template <typename T>
constexpr int kVectorSize = 16 / sizeof(T);

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__half x) {
  return __half2float(x);
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

}  // namespace mlx_cuda
