// The numbers that elementwise/noise.cu writes, for host and device code.
#pragma once

namespace mlx_cuda {

enum class NoiseType : int { float32, float16, bfloat16, fp8 };

}  // namespace mlx_cuda
