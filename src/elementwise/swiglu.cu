// out = silu(gate) * up. The elements of a row are adjacent and rows have any stride, so that the two halves of one projection
// need no copy. Each thread processes one vector of N elements, in float32.
#include "device/types.cuh"
#include "device/vector.cuh"
#include "elementwise/kernels.h"

namespace mlx_cuda {

// float32 results are held to float32 accuracy; the 16-bit ones are rounded to at most 11 bits, far above __expf's error.
__device__ inline float exponential(float x, float) {
  return expf(x);
}
template <typename T>
__device__ inline float exponential(float x, T) {
  return __expf(x);
}

template <typename T>
__device__ inline T swiglu(T gate, T up) {
  const float g = to_float(gate);
  return from_float<T>(g / (1.0f + exponential(-g, T{})) * to_float(up));
}

template <typename T, int N>
__device__ inline void swiglu_rows(
    const T* gate, const T* up, T* out, long long rows, long long columns, long long gate_stride, long long up_stride) {
  using V = Vector<T, N>;
  const long long column = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (column >= columns) {
    return;
  }
  for (long long row = blockIdx.y; row < rows; row += gridDim.y) {
    const V g = *reinterpret_cast<const V*>(gate + row * gate_stride + column);
    const V u = *reinterpret_cast<const V*>(up + row * up_stride + column);
    V result;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      result.value[i] = swiglu(g.value[i], u.value[i]);
    }
    *reinterpret_cast<V*>(out + row * columns + column) = result;
  }
}

#define MLX_CUDA_SWIGLU(name, dtype, VECTOR)                                                                                 \
  extern "C" __global__ void __launch_bounds__(256) name(                                                                    \
      const types::dtype* gate, const types::dtype* up, types::dtype* out, long long rows, long long columns,                \
      long long gate_stride, long long up_stride) {                                                                          \
    swiglu_rows<types::dtype, VECTOR ? kVectorSize<types::dtype> : 1>(gate, up, out, rows, columns, gate_stride, up_stride); \
  }
MLX_CUDA_SWIGLU_KERNELS(MLX_CUDA_SWIGLU)

}  // namespace mlx_cuda
