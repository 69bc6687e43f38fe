// Small-M GEMM with quantized w without tensor cores: in float32, and with groups along the columns of the result (w not
// transposed). It accumulates in float32. Each block has up to `Rows` rows of x.
#include "device/kernel.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "matmul/quantized/batch.cuh"
#include "matmul/quantized/kernels.h"
#include "matmul/quantized/params.h"
#include "matmul/quantized/unpack.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kWarps = PlainKernel::kWarps;
[[maybe_unused]] constexpr int kWarpColumns = PlainKernel::kWarpColumns;

struct PlainBlock {
  const char* w;
  const char* scales;
  const char* biases;
  int first_row;
  int rows;
};

template <int Rows, typename T>
__device__ inline PlainBlock plain_block(const SplitKParams& p, int row_block, const T*& x) {
  PlainBlock block;
  const int batch = blockIdx.z;
  const long long expert = w_expert(p, batch);
  block.w = static_cast<const char*>(p.w) + expert * p.w_distance;
  block.scales = static_cast<const char*>(p.scales) + expert * p.scale_distance;
  block.biases = static_cast<const char*>(p.biases) + expert * p.scale_distance;
  block.first_row = row_block * Rows;
  block.rows = min(p.rows - block.first_row, Rows);
  x = static_cast<const T*>(p.x) + x_matrix(p, batch) * p.x_distance + static_cast<long long>(block.first_row) * p.x_row;
  return block;
}

template <typename T>
__device__ inline void write_sum(const SplitKParams& p, const PlainBlock& block, int split, int row, int column, float sum) {
  const long long place = (blockIdx.z * static_cast<long long>(p.rows) + block.first_row + row) * p.columns + column;
  if (p.partial) {
    p.partial[static_cast<long long>(split) * gridDim.z * p.rows * p.columns + place] = sum;
  } else {
    static_cast<T*>(p.out)[place] = from_float<T>(sum);
  }
}

// 8 values of a row of x.
__device__ inline void load_values(const float* from, float (&to)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 v = __ldg(reinterpret_cast<const float4*>(from) + i);
    to[4 * i] = v.x;
    to[4 * i + 1] = v.y;
    to[4 * i + 2] = v.z;
    to[4 * i + 3] = v.w;
  }
}
template <typename T>
__device__ inline void load_values(const T* from, float (&to)[8]) {
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack(word(v, i), T{});
    to[2 * i] = two.x;
    to[2 * i + 1] = two.y;
  }
}

// w transposed: each warp has four rows of w, its lanes take turns at pieces of 8 values.
template <typename Format, typename T, int Rows>
__device__ inline void plain_transposed(const SplitKParams& p) {
  const int lane = threadIdx.x % 32;
  const int column = (blockIdx.x * kWarps + threadIdx.x / 32) * kWarpColumns;
  const T* x;
  const PlainBlock block = plain_block<Rows>(p, blockIdx.y, x);
  if (column >= p.columns) {
    return;
  }
  float sums[kWarpColumns][Rows] = {};
#pragma unroll 1
  for (int piece = lane; piece < p.inner / 8; piece += 32) {
    float values[Rows][8];
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      load_values(x + min(row, block.rows - 1) * p.x_row + piece * 8, values[row]);
    }
#pragma unroll
    for (int c = 0; c < kWarpColumns; ++c) {
      const long long w_row = min(column + c, p.columns - 1);
      const uint2 packed = load_piece<Format>(reinterpret_cast<const unsigned*>(block.w + w_row * p.row_bytes), piece);
      float weights[8];
      dequantize_piece<Format, T>(packed, block.scales, block.biases, w_row * p.groups + (piece >> (p.group_shift - 3)), weights);
#pragma unroll
      for (int row = 0; row < Rows; ++row) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[c][row] = fmaf(weights[i], values[row][i], sums[c][row]);
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kWarpColumns; ++c) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      const float sum = warp_sum(sums[c][row]);
      if (lane == 0 && row < block.rows && column + c < p.columns) {
        write_sum<T>(p, block, 0, row, column + c, sum);
      }
    }
  }
}

// w [inner, columns]: each lane has 8 adjacent columns, the warps take turns at the rows of w.
template <typename Format, typename T, int Rows>
__device__ inline void plain(const SplitKParams& p) {
  constexpr int unroll = 2;
  __shared__ float results[kWarps][Rows][PlainKernel::kColumns + 4];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int split = blockIdx.y % p.splits;
  const T* x;
  const PlainBlock block = plain_block<Rows>(p, blockIdx.y / p.splits, x);
  const int piece = blockIdx.x * 32 + lane;
  const bool there = piece < p.columns / 8;
  const int end = min((split + 1) * p.range, p.inner);
  float sums[Rows][8] = {};
#pragma unroll 1
  for (int k0 = split * p.range + warp; k0 < end && there; k0 += kWarps * unroll) {
    uint2 packed[unroll];
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const long long k = min(k0 + u * kWarps, end - 1);
      packed[u] = load_piece<Format>(reinterpret_cast<const unsigned*>(block.w + k * p.row_bytes), piece);
    }
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      const long long k = k0 + u * kWarps;
      if (k < end) {
        float weights[8];
        dequantize_piece<Format, T>(packed[u], block.scales, block.biases, k * p.groups + (piece >> (p.group_shift - 3)), weights);
#pragma unroll
        for (int row = 0; row < Rows; ++row) {
          const float v = to_float(x[static_cast<long long>(min(row, block.rows - 1)) * p.x_row + k]);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            sums[row][i] = fmaf(weights[i], v, sums[row][i]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int row = 0; row < Rows; ++row) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      results[warp][row][lane * 8 + i] = sums[row][i];
    }
  }
  __syncthreads();
  for (int index = threadIdx.x; index < block.rows * PlainKernel::kColumns; index += kWarps * 32) {
    const int row = index / PlainKernel::kColumns;
    const int column = blockIdx.x * PlainKernel::kColumns + index % PlainKernel::kColumns;
    if (column < p.columns) {
      float sum = 0.0f;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        sum += results[part][row][index % PlainKernel::kColumns];
      }
      write_sum<T>(p, block, split, row, column, sum);
    }
  }
}

// out = the sum of the splits' results.
template <typename T>
__device__ inline void merge(const float* partial, T* out, long long size, int splits) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < size) {
    float sum = 0.0f;
    for (int split = 0; split < splits; ++split) {
      sum += partial[split * size + i];
    }
    out[i] = from_float<T>(sum);
  }
}

#define MLX_CUDA_TRANSPOSED(name, dtype, format, rows) \
  MLX_CUDA_KERNEL(name, (PlainKernel::kThreads), SplitKParams, plain_transposed<formats::format, types::dtype, rows>)
#define MLX_CUDA_PLAIN(name, dtype, format, rows) \
  MLX_CUDA_KERNEL(name, (PlainKernel::kThreads), SplitKParams, plain<formats::format, types::dtype, rows>)
MLX_CUDA_PLAIN_KERNELS(MLX_CUDA_TRANSPOSED, MLX_CUDA_PLAIN)

#define MLX_CUDA_MERGE(name, dtype)                                               \
  extern "C" __global__ void __launch_bounds__(PlainKernel::kThreads)             \
      name(const float* partial, types::dtype* out, long long size, int splits) { \
    merge(partial, out, size, splits);                                            \
  }
MLX_CUDA_QUANTIZED_MERGE_KERNELS(MLX_CUDA_MERGE)

}  // namespace mlx_cuda
