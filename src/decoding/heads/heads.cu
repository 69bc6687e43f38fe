// A token's queries, keys and values: RMS norm by head, rotary embedding, and the append to the KV cache, a warp for each head.
#include "decoding/append/quantized_row.cuh"
#include "decoding/heads/heads.cuh"
#include "device/ptx.cuh"
#include "device/types.cuh"

namespace mlx_cuda {

// `append` is given whether it is about keys or values, the row of their cache, and what gives it (column, value) for each column.
template <typename T, typename Append>
__device__ inline void heads(const HeadsParams& p, const Append& append) {
  __shared__ float memory[HeadsParams::kWarps][HeadsParams::kMostDim];
  launch_dependents();
  const int all = p.heads[0] + 2 * p.heads[1];
  const int index = blockIdx.x * HeadsParams::kWarps + threadIdx.x / 32;
  const int batch = index / all;
  const int place = index % all;
  const int kind = place < p.heads[0] ? 0 : place < p.heads[0] + p.heads[1] ? HeadsParams::kKeys : HeadsParams::kValues;
  const int first = kind == 0 ? 0 : kind == HeadsParams::kKeys ? p.heads[0] : p.heads[0] + p.heads[1];
  const int row = batch * p.heads[kind == 0 ? 0 : 1] + place - first;
  Head<T, HeadsParams::kMostDim> head;
  head.read_norms(p, kind);
  wait_for_grids();
  if (batch >= p.batch) {
    return;
  }
  // All loads are issued before any is used.
  head.read_row(p, kind, row);
  const int page = __ldcg(p.where + batch);
  const int place_in_page = __ldcg(p.where + p.batch + batch);
  Turns<HeadsParams::kMostDim> turns;
  turns.make(p, position_of(p, batch));
  const auto make = [&](const auto& put) { head.make(p, kind, turns, memory[threadIdx.x / 32], put); };
  if (kind == 0) {
    T* to = static_cast<T*>(p.queries) + static_cast<long long>(row) * p.dim;
    make([&](int column, T value) { to[column] = value; });
  } else if (page >= 0) {
    append(kind - 1, (static_cast<long long>(page) * p.heads[1] + place - first) * p.capacity + place_in_page, make);
  }
}

template <typename T>
__device__ inline void heads(const HeadsParams& p) {
  heads<T>(p, [&](int which, long long row, const auto& make) {
    T* to = static_cast<T*>(p.caches[which]) + row * p.dim;
    make([&](int column, T value) { to[column] = value; });
  });
}

template <typename T, int Bits>
__device__ inline void quantized_heads(const QuantizedHeadsParams& p) {
  __shared__ T rows[HeadsParams::kWarps][HeadsParams::kMostDim];
  heads<T>(p.heads, [&](int which, long long row, const auto& make) {
    T* own = rows[threadIdx.x / 32];
    make([&](int column, T value) { own[column] = value; });
    float values[kMostOfLane];
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) {
      const int column = i * 32 + static_cast<int>(threadIdx.x) % 32;
      values[i] = column < p.heads.dim ? to_float(own[column]) : 0.0f;
    }
    store_quantized<T, Bits>(p.to, which, row, values);
  });
}

}  // namespace mlx_cuda

#define MLX_CUDA_HEADS(name, dtype)                                                \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::HeadsParams::kWarps * 32) \
      name(const __grid_constant__ mlx_cuda::HeadsParams params) {                 \
    mlx_cuda::heads<mlx_cuda::types::dtype>(params);                               \
  }
#define MLX_CUDA_QUANTIZED_HEADS(name, dtype, bits)                                \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::HeadsParams::kWarps * 32) \
      name(const __grid_constant__ mlx_cuda::QuantizedHeadsParams params) {        \
    mlx_cuda::quantized_heads<mlx_cuda::types::dtype, bits>(params);               \
  }
MLX_CUDA_HEADS_KERNELS(MLX_CUDA_HEADS, MLX_CUDA_QUANTIZED_HEADS)
