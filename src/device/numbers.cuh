// Numbers that device code of several kernels needs.
#pragma once

namespace mlx_cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kLargest = __builtin_bit_cast(float, 0x7f7fffff);
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

}  // namespace mlx_cuda
