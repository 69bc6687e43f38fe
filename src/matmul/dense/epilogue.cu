// Epilogues for GEMMs for which cuBLASLt has none.
#include "device/activation.h"
#include "device/types.cuh"
#include "device/vector.cuh"
#include "matmul/dense/kernels.h"

namespace mlx_cuda {

__device__ inline float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::relu:
      return x != x ? x : fmaxf(x, 0.0f);
    case Activation::gelu_approx:
      return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    default:
      return x;
  }
}

// inside = out + bias, out = activation(inside). `inside` and `bias` may be null.
template <typename T>
__device__ inline void epilogue(T* out, T* inside, const T* bias, long long size, long long columns, Activation activation) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) {
    const float x = to_float(out[i]) + (bias ? to_float(bias[i % columns]) : 0.0f);
    if (inside) {
      inside[i] = from_float<T>(x);
    }
    out[i] = from_float<T>(activate(x, activation));
  }
}

// out = gemm * a[row] * b[column] + bias[column]. A scale that is null is 1; with a step of 0 it is one for all.
template <typename T>
__device__ inline void scaling(
    const float* gemm,
    T* out,
    const float* a,
    int a_step,
    const float* b,
    int b_step,
    const T* bias,
    long long rows,
    long long columns) {
  const long long column = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= columns) {
    return;
  }
  const float of_column = b ? b[column * b_step] : 1.0f;
  const float added = bias ? to_float(bias[column]) : 0.0f;
  for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
    const float of_row = a ? a[row * a_step] : 1.0f;
    out[row * columns + column] = from_float<T>(gemm[row * columns + column] * of_row * of_column + added);
  }
}

#define MLX_CUDA_EPILOGUE(name, dtype)                                                                      \
  extern "C" __global__ void __launch_bounds__(256) name(                                                   \
      types::dtype* out, types::dtype* inside, const types::dtype* bias, long long size, long long columns, \
      Activation activation) {                                                                              \
    epilogue<types::dtype>(out, inside, bias, size, columns, activation);                                   \
  }
#define MLX_CUDA_SCALING(name, dtype)                                                                                         \
  extern "C" __global__ void __launch_bounds__(256) name(                                                                     \
      const float* gemm, types::dtype* out, const float* a, int a_step, const float* b, int b_step, const types::dtype* bias, \
      long long rows, long long columns) {                                                                                    \
    scaling<types::dtype>(gemm, out, a, a_step, b, b_step, bias, rows, columns);                                              \
  }
MLX_CUDA_EPILOGUE_KERNELS(MLX_CUDA_EPILOGUE, MLX_CUDA_SCALING)

}  // namespace mlx_cuda
