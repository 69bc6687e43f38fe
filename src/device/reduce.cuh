// Reductions over lanes, a warp or a block: all of them get the result. The order of lanes is fixed, because float sums depend on
// it.
#pragma once

#include "device/ptx.cuh"

namespace mlx_cuda {

struct Sum {
  template <typename T>
  __device__ T operator()(T one, T other) const {
    return one + other;
  }
};
struct NanMax {
  __device__ float operator()(float one, float other) const {
    return nan_max(one, other);
  }
};

// Of so many adjacent lanes, the most distant first.
template <int Lanes, typename T, typename Combine>
__device__ inline T of_lanes(T value, const Combine& combine) {
#pragma unroll
  for (int distance = Lanes / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, distance));
  }
  return value;
}
template <int Lanes, typename T>
__device__ inline T lanes_sum(T value) {
  return of_lanes<Lanes>(value, Sum{});
}
template <typename T>
__device__ inline T warp_sum(T value) {
  return lanes_sum<32>(value);
}

// Of each `Step`th of so many lanes, the nearest first.
template <int Step, int Lanes, typename T, typename Combine>
__device__ inline T of_near_lanes(T value, const Combine& combine) {
#pragma unroll
  for (int distance = Step; distance < Lanes; distance *= 2) {
    value = combine(value, __shfl_xor_sync(~0u, value, distance));
  }
  return value;
}
// Of the four lanes that have a row of a tensor core's tile.
__device__ inline float quad_max(float value) {
  return of_near_lanes<1, 4>(value, NanMax{});
}
__device__ inline float quad_sum(float value) {
  return of_near_lanes<1, 4>(value, Sum{});
}

// By all threads of whole warps; `memory`: a float for each warp; `neutral`: the neutral element.
template <typename Combine>
__device__ inline float of_block(float value, float neutral, float* memory, const Combine& combine) {
  const int lane = threadIdx.x % 32;
  value = of_lanes<32>(value, combine);
  __syncthreads();  // the memory is no longer read
  if (lane == 0) {
    memory[threadIdx.x / 32] = value;
  }
  __syncthreads();
  return of_lanes<32>(lane < static_cast<int>(blockDim.x) / 32 ? memory[lane] : neutral, combine);
}

}  // namespace mlx_cuda
