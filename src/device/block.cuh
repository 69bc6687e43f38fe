// What all threads of a block have, put together.
#pragma once

namespace mlx_cuda {

// By all threads of whole warps; `memory`: a float for each warp. `combine` of two, and what changes nothing in it.
template <typename Combine>
__device__ inline float of_block(float value, float neutral, float* memory, const Combine& combine) {
  const int lane = threadIdx.x % 32;
  const auto of_warp = [&](float each) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      each = combine(each, __shfl_xor_sync(~0u, each, offset));
    }
    return each;
  };
  value = of_warp(value);
  __syncthreads();  // nobody reads the memory any more
  if (lane == 0) {
    memory[threadIdx.x / 32] = value;
  }
  __syncthreads();
  return of_warp(lane < static_cast<int>(blockDim.x) / 32 ? memory[lane] : neutral);
}

}  // namespace mlx_cuda
