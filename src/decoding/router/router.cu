// The MoE router of one token: softmax, top-k and scores, by one block with a thread for each expert.
#include "decoding/router/params.h"
#include "device/numbers.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "device/vector.cuh"

namespace mlx_cuda {

// Scores are rounded as MLX's arrays are: if rounded scores are equal, the lower expert number wins.
template <typename T>
__device__ inline void route(const RouterParams& p) {
  __shared__ float scores[RouterParams::kMostExperts];
  __shared__ float memory[RouterParams::kMostExperts / 32];
  begin_pdl();
  const int expert = threadIdx.x;
  const bool there = expert < p.experts;
  float score = there ? to_float(static_cast<const T*>(p.logits)[expert]) : -kInfinity;
  if (p.before == RouterScores::softmax) {
    const float weight = __expf(score - of_block(score, -kInfinity, memory, NanMax{}));
    score = to_float(from_float<T>(weight / of_block(weight, 0.0f, memory, Sum{})));
  }
  // As many are chosen whatever there is. To MLX's sort NaN is the highest number: of the scores it is chosen, of their negatives
  // not.
  const float key = score == score ? score : p.first_of_equals ? -kInfinity : kInfinity;
  scores[expert] = key;
  __syncthreads();
  int better = 0;
  for (int other = 0; other < p.experts; ++other) {
    better += scores[other] > key || (scores[other] == key && (p.first_of_equals ? other < expert : other > expert));
  }
  const bool chosen = there && better < p.count;
  if (p.after == RouterScores::softmax) {
    const float top = of_block(chosen ? score : -kInfinity, -kInfinity, memory, NanMax{});
    const float weight = chosen ? __expf(score - top) : 0.0f;
    score = weight / of_block(weight, 0.0f, memory, Sum{});
  } else if (p.after == RouterScores::normalised) {
    score /= of_block(chosen ? score : 0.0f, 0.0f, memory, Sum{});
  }
  if (chosen) {
    const int place = p.count - 1 - better;
    p.chosen[place] = expert;
    static_cast<T*>(p.scores)[place] = from_float<T>(score);
  }
}

}  // namespace mlx_cuda

#define MLX_CUDA_ROUTER(name, dtype)                                                 \
  extern "C" __global__ void __launch_bounds__(mlx_cuda::RouterParams::kMostExperts) \
      name(const __grid_constant__ mlx_cuda::RouterParams params) {                  \
    mlx_cuda::route<mlx_cuda::types::dtype>(params);                                 \
  }
MLX_CUDA_ROUTER_KERNELS(MLX_CUDA_ROUTER)
