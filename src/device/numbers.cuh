// Numbers that device code of several kernels needs.
#pragma once

namespace mlx_cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kLargest = __builtin_bit_cast(float, 0x7f7fffff);
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

#ifdef __CUDACC__
// The larger of two numbers, or NaN where one is NaN. fmaxf gives the other one then: a clamp or a maximum by fmaxf makes finite
// results of NaN.
__device__ inline float nan_max(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
#else
  return a > b || a != a ? a : b;
#endif
}
#endif

}  // namespace mlx_cuda
