// The MoE router of one token as a kernel of its own.
#include "decoding/router/route.cuh"

namespace mlx_cuda {

template <typename T>
__device__ inline void route(const RouterParams& p) {
  begin_pdl();
  with_each(p, [&]<int Each>() {
    const Route<T, Each> route(p);
    float logits[Each];
#pragma unroll
    for (int i = 0; i < Each; ++i) {
      logits[i] = route.is_expert(i) ? to_float(static_cast<const T*>(p.logits)[route.expert_of(i)]) : 0.0f;
    }
    unsigned chosen;
    float score = 0.0f;
    route.run(logits, chosen, score);
    if (const auto place = static_cast<int>(threadIdx.x); place < p.count) {
      p.chosen[place] = chosen;
      static_cast<T*>(p.scores)[place] = from_float<T>(score);
    }
  });
}

}  // namespace mlx_cuda

#define MLX_CUDA_ROUTER(name, dtype)                                                                             \
  extern "C" __global__ void __launch_bounds__(32) name(const __grid_constant__ mlx_cuda::RouterParams params) { \
    mlx_cuda::route<mlx_cuda::types::dtype>(params);                                                             \
  }
MLX_CUDA_ROUTER_KERNELS(MLX_CUDA_ROUTER)
