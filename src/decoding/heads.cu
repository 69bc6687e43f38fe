// A token's queries, keys and values: RMS norm by head, rotary embedding, and the append to the KV cache, a warp for each head.
#include "decoding/heads.cuh"
#include "device/grid.cuh"

namespace mlx_cuda {

template <typename T>
__device__ inline void heads(const HeadsParams& p) {
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
  // All that is read is asked for before any of it is used.
  head.read_row(p, kind, row);
  T* to = static_cast<T*>(p.queries) + static_cast<long long>(row) * p.dim;
  if (kind != 0) {
    const int page = __ldcg(p.where + batch);
    if (page < 0) {
      return;
    }
    const long long of_page = static_cast<long long>(page) * p.heads[1] + place - first;
    to = static_cast<T*>(p.caches[kind - 1]) + (of_page * p.capacity + __ldcg(p.where + p.batch + batch)) * p.dim;
  }
  Turns<HeadsParams::kMostDim> turns;
  turns.make(p, position_of(p, batch));
  head.make(p, kind, turns, memory[threadIdx.x / 32], [&](int column, T value) { to[column] = value; });
}

}  // namespace mlx_cuda

#define MLX_CUDA_HEADS(name, T)                                                    \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::HeadsParams::kWarps * 32) \
      heads_##name(const __grid_constant__ mlx_cuda::HeadsParams params) {         \
    mlx_cuda::heads<T>(params);                                                    \
  }

MLX_CUDA_HEADS(float32, float)
MLX_CUDA_HEADS(float16, __half)
MLX_CUDA_HEADS(bfloat16, __nv_bfloat16)
