// out = activation(out + bias) in place, row by row: what cuBLASLt's epilogue does, for the products for which it has none.
#include "kernels/vector.cuh"

namespace mlx_cuda {

// The order of mlx_cuda::Activation.
enum Activation { none, relu, gelu_approx };

__device__ inline float activate(float x, int activation) {
  switch (activation) {
    case relu:
      return x != x ? x : fmaxf(x, 0.0f);
    case gelu_approx:
      return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    default:
      return x;
  }
}

template <typename T>
__device__ inline void epilogue(T* out, const T* bias, long long size, long long columns, int activation) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    const float x = to_float(out[i]) + (bias ? to_float(bias[i % columns]) : 0.0f);
    out[i] = from_float<T>(activate(x, activation));
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_EPILOGUE(name, T)                                                     \
  extern "C" __global__ void __launch_bounds__(256)                                    \
      name(T* out, const T* bias, long long size, long long columns, int activation) { \
    mlx_cuda::epilogue<T>(out, bias, size, columns, activation);                       \
  }

MLX_CUDA_EPILOGUE(epilogue_float32, float)
MLX_CUDA_EPILOGUE(epilogue_float16, __half)
MLX_CUDA_EPILOGUE(epilogue_bfloat16, __nv_bfloat16)
