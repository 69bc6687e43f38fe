// The gradient through an activation and that of the bias in one pass: inner = outer * activation'(saved), and the sums of its
// columns.
//
// A warp reads rows of one vector per lane, the warps of a block every eighth row; each thread adds up its columns in float32.
// Sums of a block's rows go to `partial`, which column_sums adds up: in the same order in every run.
#include "device/activation.h"
#include "device/types.cuh"
#include "device/vector.cuh"
#include "matmul/dense/kernels.h"

namespace mlx_cuda {

constexpr int kWarps = 8;

// relu gets its result, gelu_approx its argument.
__device__ inline float derivative(float saved, Activation activation) {
  if (activation == Activation::relu) {
    return saved > 0.0f ? 1.0f : 0.0f;
  }
  if (activation == Activation::none) {
    return 1.0f;
  }
  // gelu_approx(x) = x * s(x) with the logistic function s of 2 sqrt(2/pi) (x + 0.044715 x^3); beyond 16 its gradient is 0 or 1,
  // and NaN at infinity, as MLX's.
  const float x = saved > 16.0f ? 16.0f : saved < -16.0f ? -16.0f : saved;
  const float square = x * x;
  const float s = __fdividef(1.0f, 1.0f + __expf(-1.5957691216057308f * x * (1.0f + 0.044715f * square)));
  return fmaf(saved, 0.0f, s + x * s * (1.0f - s) * 1.5957691216057308f * (1.0f + 0.134145f * square));
}

// `inner` is null where only the sums are wanted, `partial` where they are not.
template <typename T, int N>
__device__ inline void gradient(
    const T* outer,
    long long outer_stride,
    const T* saved,
    T* inner,
    float* partial,
    long long rows,
    long long columns,
    Activation activation) {
  constexpr int kTogether = 2;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const long long column = (static_cast<long long>(blockIdx.x) * 32 + lane) * N;
  const bool inside = column < columns;
  using V = Vector<T, N>;
  float sums[N] = {};
  const long long step = static_cast<long long>(gridDim.y) * kWarps;
  for (long long first = static_cast<long long>(blockIdx.y) * kWarps + warp; inside && first < rows; first += kTogether * step) {
    V from[kTogether], at[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const long long row = first + i * step;
      if (row < rows) {
        from[i] = *reinterpret_cast<const V*>(outer + row * outer_stride + column);
        if (saved) {
          at[i] = *reinterpret_cast<const V*>(saved + row * columns + column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const long long row = first + i * step;
      if (row < rows) {
        V out;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const float inner_value = to_float(from[i].value[j]) * (saved ? derivative(to_float(at[i].value[j]), activation) : 1.0f);
          out.value[j] = from_float<T>(inner_value);
          sums[j] += inner_value;
        }
        if (inner) {
          *reinterpret_cast<V*>(inner + row * columns + column) = out;
        }
      }
    }
  }
  if (!partial) {
    return;
  }
  __shared__ float shared[kWarps][32 * N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    shared[warp][j * 32 + lane] = sums[j];
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < 32 * N; i += kWarps * 32) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += shared[w][i];
    }
    const long long place = (static_cast<long long>(blockIdx.x) * 32 + i % 32) * N + i / 32;
    if (place < columns) {
      partial[blockIdx.y * columns + place] = sum;
    }
  }
}

template <typename T>
__device__ inline void column_sums(const float* partial, T* out, int parts, long long columns) {
  const long long column = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= columns) {
    return;
  }
  float sum = 0.0f;
#pragma unroll 8
  for (int part = 0; part < parts; ++part) {
    sum += partial[part * columns + column];
  }
  out[column] = from_float<T>(sum);
}

#define MLX_CUDA_GRADIENT(name, dtype, VECTOR)                                                                           \
  extern "C" __global__ void __launch_bounds__(256, 3) name(                                                             \
      const types::dtype* outer, long long outer_stride, const types::dtype* saved, types::dtype* inner, float* partial, \
      long long rows, long long columns, Activation activation) {                                                        \
    gradient<types::dtype, VECTOR ? 16 / sizeof(types::dtype) : 1>(                                                      \
        outer, outer_stride, saved, inner, partial, rows, columns, activation);                                          \
  }
#define MLX_CUDA_COLUMN_SUMS(name, dtype)                                                                                         \
  extern "C" __global__ void __launch_bounds__(128) name(const float* partial, types::dtype* out, int parts, long long columns) { \
    column_sums<types::dtype>(partial, out, parts, columns);                                                                      \
  }
MLX_CUDA_GRADIENT_KERNELS(MLX_CUDA_GRADIENT, MLX_CUDA_COLUMN_SUMS)

}  // namespace mlx_cuda
