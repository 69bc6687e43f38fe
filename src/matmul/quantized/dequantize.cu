// out = dequantized weights. Each thread processes a few pieces of 8 values far apart, so that the accesses of a warp are
// coalesced. Groups and rows are whole numbers of pieces, and rows are adjacent: the pieces of an expert are one long row.
#include "device/kernel.cuh"
#include "device/types.cuh"
#include "matmul/quantized/kernels.h"
#include "matmul/quantized/params.h"
#include "matmul/quantized/values.cuh"

namespace mlx_cuda {

[[maybe_unused]] constexpr int kThreads = DequantizeParams::kThreads;
[[maybe_unused]] constexpr int kPieces = DequantizeParams::kPieces;

// All loads come before the first value is computed: the more of them are under way, the faster is memory.
template <typename Format, typename T>
__device__ inline void write_values(
    const DequantizeParams& p, const unsigned* w, const void* scales, const void* biases, long long first, T* out) {
  uint2 pieces[kPieces];
  GroupScale<Format, T> groups[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const long long index = min(first + i * kThreads, p.pieces - 1);
    pieces[i] = load_piece<Format>(w, index);
    groups[i].load(scales, biases, index >> (p.group_shift - 3));
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const long long index = first + i * kThreads;
    groups[i].expand();
    const uint4 values = values_in_order<Format, T>(pieces[i], groups[i]);
    if (index < p.pieces) {
      reinterpret_cast<uint4*>(out)[index] = values;
    }
  }
}

template <typename Format>
__device__ inline void write_values(
    const DequantizeParams& p, const unsigned* w, const void* scales, const void* biases, long long first, float* out) {
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const long long index = first + i * kThreads;
    if (index < p.pieces) {
      float v[8];
      dequantize_piece<Format, float>(load_piece<Format>(w, index), scales, biases, index >> (p.group_shift - 3), v);
      auto* to = reinterpret_cast<float4*>(out) + index * 2;
      to[0] = make_float4(v[0], v[1], v[2], v[3]);
      to[1] = make_float4(v[4], v[5], v[6], v[7]);
    }
  }
}

template <typename Format, typename T>
__device__ inline void dequantize(const DequantizeParams& p) {
  const int expert = blockIdx.y;
  if (p.offsets && p.offsets[expert] == p.offsets[expert + 1]) {
    return;
  }
  const unsigned* w = reinterpret_cast<const unsigned*>(static_cast<const char*>(p.w) + expert * p.w_distance);
  const char* scales = static_cast<const char*>(p.scales) + expert * p.scale_distance;
  const char* biases = static_cast<const char*>(p.biases) + expert * p.scale_distance;
  T* out = static_cast<T*>(p.out) + expert * p.out_distance;

  const long long first = static_cast<long long>(blockIdx.x) * (kThreads * kPieces) + threadIdx.x;
  if constexpr (sizeof(T) == 2) {
    write_values<Format, T>(p, w, scales, biases, first, out);
  } else {
    write_values<Format>(p, w, scales, biases, first, out);
  }
}

#define MLX_CUDA_DEQUANTIZE(name, dtype, format) \
  MLX_CUDA_KERNEL(name, (DequantizeParams::kThreads), DequantizeParams, dequantize<formats::format, types::dtype>)
MLX_CUDA_DEQUANTIZE_KERNELS(MLX_CUDA_DEQUANTIZE)

}  // namespace mlx_cuda
