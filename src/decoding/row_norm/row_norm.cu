// A token's RMS norm, and its sum with a residual or its multiple by a number: a block for each row, 16 bytes for each thread.
#include "decoding/row_norm/params.h"
#include "device/kernel.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

template <typename T>
__device__ inline void row_norm(const RowNormParams& p) {
  __shared__ float memory[RowNormParams::kMostThreads / 32];
  launch_dependents();
  const int pieces = p.inner / RowNormParams::kPiece;
  const bool there = static_cast<int>(threadIdx.x) < pieces;
  const long long at = static_cast<long long>(blockIdx.x) * pieces + threadIdx.x;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  // Weights are never a kernel's result: they are read before the wait (PDL).
  const uint4 norms = there && p.norm ? __ldg(static_cast<const uint4*>(p.norm) + threadIdx.x) : zeros;
  const float scale = p.scale ? to_float(*static_cast<const T*>(p.scale)) : 1.0f;
  wait_for_grids();
  const uint4 x = there ? __ldcg(static_cast<const uint4*>(p.x) + at) : zeros;
  const uint4 added = there && p.added ? __ldcg(static_cast<const uint4*>(p.added) + at) : zeros;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack(word(x, i), T{});
    squares = fmaf(two.x, two.x, fmaf(two.y, two.y, squares));
  }
  squares = of_block(squares, 0.0f, memory, Sum{});
  const float factor = rsqrtf(squares / static_cast<float>(p.inner) + p.eps);
  unsigned sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack(word(x, i), T{});
    const float2 by = p.norm ? unpack(word(norms, i), T{}) : make_float2(1, 1);
    const float2 rounded = unpack(pack(two.x * factor * by.x, two.y * factor * by.y, T{}), T{});  // as the norm's array is
    const float2 to = unpack(word(added, i), T{});
    sums[i] = pack(fmaf(rounded.x, scale, to.x), fmaf(rounded.y, scale, to.y), T{});
  }
  if (there) {
    static_cast<uint4*>(p.out)[at] = make_uint4(sums[0], sums[1], sums[2], sums[3]);
  }
}

#define MLX_CUDA_ROW_NORM(name, dtype) MLX_CUDA_KERNEL(name, (RowNormParams::kMostThreads), RowNormParams, row_norm<types::dtype>)
MLX_CUDA_ROW_NORM_KERNELS(MLX_CUDA_ROW_NORM)

}  // namespace mlx_cuda
